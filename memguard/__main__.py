"""`python -m memguard` is the `memguard` command."""

import os
import sys

# Python puts the current folder first, where a json.py may be the user's. Keep the folder if it contains memguard.
if sys.path and not os.path.samefile(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sys.path[0] or "."):
    del sys.path[0]

from memguard.cli import main

if __name__ == "__main__":
    main(prog_name="memguard")
