"""The lowest layer: sizes, text, data types, locks, undo steps and framework specs; imports no other subpackage."""
