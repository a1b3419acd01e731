"""Pure checks: facts in, findings out. One file per subject, one function per finding or family of findings.

A check is a function of `Facts` with the decorator `check`; `examine` discovers it. Checks read no clock, file,
environment or GPU. If one cause (no driver, a full GPU) explains the evidence of a second check, the second one yields
nothing, so that the user has one thing to fix: `derived.blocked_by` and `derived.explained` decide that.
"""
