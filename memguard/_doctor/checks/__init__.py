"""Pure checks: facts in, findings out. One file per subject, one function per finding or family of findings.

A check is a function of `Facts` that yields findings; `CHECKS` of each file lists its own. It touches no clock, file,
environment or GPU. Where one cause explains another check's evidence (a driver that is absent, a card that is full),
the check of the consequence yields nothing: who reads the findings has one thing to mend.
"""
