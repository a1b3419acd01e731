"""Run one program of `tests/gpu/programs/` under its folder's budget, as a user would; record memguard's output.

    python tests/support/moment_child.py program.py said.jsonl

Each process of the program appends one line: its last report and every event. The program itself is unchanged."""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import runpy
import sys
import time
from typing import Any


class Said:
    """memguard's last report and events in this process."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.events: list[dict[str, Any]] = []
        self.began = time.monotonic()

    def note(self, event: Any) -> None:
        level = None if event.level is None else event.level.value
        at = round(time.monotonic() - self.began, 2)
        self.events.append({"at": at, "kind": event.kind, "level": level, "text": event.text[:300]})
        if event.kind == "oom":
            self.write()  # a framework may hang or crash at exit

    def write(self) -> None:
        import memguard

        report = memguard.last_oom()
        plain = None
        if report is not None:
            plain = {name: value for name, value in report.as_dict().items() if name != "samples"}
        line = {
            "pid": os.getpid(), "report": plain, "printed": None if report is None else str(report),
            "events": self.events,
        }  # fmt: skip
        with open(self.where, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def in_worker(self) -> None:
        """In a forked child: write its own events when multiprocessing ends it."""
        self.events = []
        multiprocessing.util.Finalize(None, self.write, exitpriority=10)


def main() -> None:
    program, where = sys.argv[1:]
    from bench.programs.six import put_row_stack_back

    put_row_stack_back()
    import memguard

    said = Said(where)
    memguard.init("budget.yaml")
    memguard.on_event(said.note)
    atexit.register(said.write)
    multiprocessing.util.register_after_fork(said, Said.in_worker)
    sys.argv = [program]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
