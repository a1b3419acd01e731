"""Applies a budget to a process: guard, cap table, elastic caps, reclaim, reservations and admission control."""
