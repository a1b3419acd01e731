"""RMM: a limit around its memory resource."""
