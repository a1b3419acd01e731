"""Pure checks: facts in, findings out. One file per subject, one function per finding or family of findings.

A check is a function of `Facts` that yields findings; `CHECKS` of each file lists its own. It touches no clock, file,
environment or GPU. If one cause (no driver, a full GPU) explains another check's evidence, that check yields nothing:
the reader then has one thing to fix. `explanations` says what explains what.
"""
