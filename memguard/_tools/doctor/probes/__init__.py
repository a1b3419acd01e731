"""The code of the probe processes, together with `probe.py` in each framework's folder.

Probes run in the examined interpreter, which may lack memguard: they use only the standard library, import nothing of
memguard at run time, and use the syntax of Python 3.8. `main` runs them and sends their reports to the parent.
"""
