"""Sizes, texts, data types, locks, undo steps and framework specs for every room. Imports no other room of memguard."""
