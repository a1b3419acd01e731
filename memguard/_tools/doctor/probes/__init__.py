"""What runs in the processes that `memguard doctor` starts: a file for each framework, `probe(report)` in it.

They run in the interpreter to examine, which may not have memguard: they use the standard library alone, import
nothing of memguard at run time, and keep to the syntax of Python 3.8. `main` runs them and sends their reports to the
parent.
"""
