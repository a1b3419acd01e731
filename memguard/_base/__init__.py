"""Sizes, texts, types, locks, undo steps and specs: what every room builds on. Imports nothing else of memguard."""
