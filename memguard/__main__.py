"""`python -m memguard` is the `memguard` command."""

from memguard.cli import main

if __name__ == "__main__":
    main(prog_name="memguard")
