"""`python -m memguard` is the `memguard` command."""

import os
import sys

# Python puts the current folder first, whose json.py is somebody's file. If memguard itself is in it, it has to stay.
if sys.path and not os.path.samefile(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sys.path[0] or "."):
    del sys.path[0]

from memguard.cli import main

if __name__ == "__main__":
    main(prog_name="memguard")
