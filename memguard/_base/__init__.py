"""Sizes, texts, types, locks, undo steps and specs: what every room builds on. Imports only `memguard.errors`."""
