"""python -m bench run ID… [--quick]"""

from __future__ import annotations

import argparse

from bench.child import Child
from bench.measure import discover


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("ids", nargs="+")
    run.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    known = discover()
    for name in arguments.ids:
        words = ["-m", "bench.one", known[name].function.__module__, name, *(["--quick"] if arguments.quick else [])]
        print(Child(words, timeout=2 * known[name].seconds + 60).end(), flush=True)


if __name__ == "__main__":
    main()
