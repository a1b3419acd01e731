"""What runs in the processes that `memguard doctor` starts, with `probe.py` of each framework's folder.

They run in the interpreter to examine, which may not have memguard: they use the standard library alone, import
nothing of memguard at run time, and keep to the syntax of Python 3.8. `main` runs them and sends their reports to the
parent.
"""
