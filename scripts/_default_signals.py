"""Start `python ARGUMENTS...` with the signals that a program has that is started in the foreground of a terminal.

A shell starts what runs in its background with SIGINT ignored, and nohup starts it with SIGHUP ignored. Ignored signals
are inherited: without this, no process of the tests could be interrupted. A program in the background whose SIGHUP was
ignored gets a session of its own, so that it outlives its terminal as before.
"""

from __future__ import annotations

import os
import signal
import sys


def in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    return os.tcgetpgrp(terminal) == os.getpgrp()


signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not in_foreground():
    if os.getpid() != os.getpgrp():
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
