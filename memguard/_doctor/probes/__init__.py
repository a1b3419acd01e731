"""What runs in the processes that `memguard doctor` starts: a file for each framework, `probe(report)` in it.

They run in the interpreter in question, which may have nothing of memguard's: the standard library alone, no import of
memguard's at run time, and syntax that Python 3.8 reads. `main` starts them and tells the parent what they report.
"""
