"""Measure, and say what has to be measured.

python -m bench run leak readings --quick       # a trial: few rounds, nothing is written
python -m bench run leak                        # again, into the result of the version in the making
python -m bench run-all --until 540             # everything; exit code 3: `run-all --resume --until 540` continues
python -m bench status                          # what a new release has to measure again
python -m bench render [--check]                # docs/results/ and the table of README
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from bench import results
from bench.measure import discover


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run, everything = commands.add_parser("run"), commands.add_parser("run-all")
    run.add_argument("ids", nargs="+", metavar="ID")
    everything.add_argument("--resume", action="store_true", help="skip what is measured and has not changed")
    everything.add_argument("--until", type=float, metavar="SECONDS", help="start nothing that would end later")
    for one in (run, everything):
        one.add_argument("--quick", action="store_true", help="the untimed pass alone; nothing is written")
        one.add_argument("-o", "--output", type=Path, metavar="FILE")
        one.add_argument("--commit", metavar="SHA", help="of this tree, if it is a copy of a commit")
    commands.add_parser("status").add_argument("file", nargs="?", type=Path)
    commands.add_parser("render").add_argument("--check", action="store_true", help="fail if a page would change")
    arguments = parser.parse_args()
    if arguments.command == "render":
        from bench import render

        return render.main(check=arguments.check)
    if arguments.command == "status":
        return status(arguments.file)
    return measure(arguments)


def measure(arguments: argparse.Namespace) -> int:
    from bench import runner

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a shell, or under nohup
            signal.signal(number, runner.end)
    known = discover()
    ids = getattr(arguments, "ids", [*known])
    if unknown := [name for name in ids if name not in known]:
        raise SystemExit(f"no measurement is called {', '.join(unknown)}; there are {', '.join(known)}")
    if arguments.quick:
        bad = 0
        for one in (known[name] for name in ids):
            found = runner.run_one(one, True, runner.QUICK_SECONDS)
            about = {"covers": "", "bench": "", "commit": "", "date": ""}
            made = runner.rows(one, found, about)
            bad += any("error" in row for row in made)
            print("\n".join([*runner.errors(found), *map(runner.line, made)]), flush=True)
            print(f"        {one.id}: {found['seconds']:.1f} s", flush=True)
        return 1 if bad else 0
    path = arguments.output or results.default_path(results.device()["gpu"])
    if path is None:
        print("no GPU: nothing is written without -o FILE")
    runs = runner.Runner(known, path, arguments.commit, getattr(arguments, "until", None))
    return runs.run(ids, resume=getattr(arguments, "resume", False))


def status(path: Path | None) -> int:
    """What has to be measured again before the release. Exit code 1 if anything has."""
    from bench.render import key

    files = sorted(results.FOLDER.glob("v*.json"), key=lambda one: key(one.name.partition("-")[0]))
    there = [results.load(one) for one in reversed([path] if path else files)] or [{"rows": [], "measures": {}}]
    print(f"memguard {results.version()} against {', '.join(one.name for one in files) or 'no result'}")
    known, again = discover(), 0
    for name in known:  # the newest file that has it; rows of an earlier release stand while their sources do
        result = next((one for one in there if results.rows_of(one, name)), there[0])
        found, rows = results.state(result, name), results.rows_of(result, name)
        missed = [row["id"] for row in rows if row["ok"] is False and "error" not in row]
        again += found != "measured"
        print(f"{name}: {found}" + (f" at {rows[0]['commit'][:12]}" if rows else "")
              + (f"; bars missed: {', '.join(missed)}" if missed else ""))  # fmt: skip
    print(f"{again} of {len(known)} to measure again" if again else "nothing to measure again")
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(main())
