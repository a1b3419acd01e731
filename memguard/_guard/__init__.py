"""The budget applied: the guard and its caps, elastic caps, reclaim, reservations and admission."""
