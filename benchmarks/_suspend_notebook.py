"""A real Jupyter kernel that goes off its GPU when it is idle, and comes back before its next cell runs."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Any

from _run import ROOT
from _suspend_arrays import REHEARSAL
from _suspend_children import HERE, Broke, Card, away_again, other, surroundings

IDLE = "3s"
PATIENCE = 45.0
BEGINS = 180.0
"""Seconds for the first cell: PyTorch may come from a cold disk."""
TEXT = 4000
"""Characters of a cell's output that are kept: a line of progress is written again and again."""
BEGIN = f"""
import memguard
torch_only = {{"torch": {{"share": "90%"}}}}
memguard.init({{"version": 1, "device": {{"limit": "16GiB"}}, "frameworks": torch_only, "monitor": {{}}}})
%load_ext memguard
import os, torch
x = torch.arange(1 << 24, device="cuda", dtype=torch.float64)
expected = float(x.sum())
%memguard suspend --when-idle {IDLE}
"""
RIGHT = "print('RIGHT' if float(x.sum()) == expected and float((x[:5] * 2).sum()) == 20.0 else 'WRONG')"


class Kernel:
    """Cells by jupyter_client, each with a time limit."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self.manager, self.pid = KernelManager(), 0
        self.client: Any = None

    def start(self) -> None:
        self.manager.start_kernel(env=surroundings(ROOT, HERE))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=90)
        self.pid = int(self.run("import os; print(os.getpid())", 60)["text"])

    def send(self, code: str) -> str:
        return str(self.client.execute(code))

    def reply(self, number: str, limit: float) -> dict[str, Any]:
        """What the cell printed, and how it ended; `status` is None if it does not end in time."""
        until, text = time.monotonic() + limit, ""
        while time.monotonic() < until:
            try:
                message = self.client.get_iopub_msg(timeout=0.5)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
            elif kind == "error":
                text += f"\n{content['ename']}: {content['evalue']}"
            elif kind in ("display_data", "update_display_data", "execute_result"):
                text += str(content["data"].get("text/plain", ""))
            elif kind == "status" and content["execution_state"] == "idle":
                return {"status": self._status(number), "text": text[-TEXT:]}
        return {"status": None, "text": text[-TEXT:]}

    def _status(self, number: str, limit: float = 10.0) -> str | None:
        """Of the reply to this request. Replies to others, for which nobody waits any more, are left out."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                reply = self.client.get_shell_msg(timeout=0.5)
                if reply["parent_header"].get("msg_id") == number:
                    return str(reply["content"]["status"])
        return None

    def run(self, code: str, limit: float) -> dict[str, Any]:
        return self.reply(self.send(code), limit)

    def end(self) -> None:
        if self.pid:
            with contextlib.suppress(Exception):
                away_again(self.pid)
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        if self.client is not None:
            self.client.stop_channels()


def notebook() -> dict[str, Any]:
    if REHEARSAL:
        return rehearsed()
    card, found = Card(), {}
    found["total"] = card.total()
    kernel = Kernel()
    try:
        kernel.start()
        found["begun"] = kernel.run(BEGIN, BEGINS)
        if found["begun"]["status"] != "ok":
            raise Broke(f"the kernel's first cell: {found['begun']}")
        found["before"] = card.of(kernel.pid)
        found["off_s"] = _until(lambda: card.of(kernel.pid) is None)
        with other("filler") as filler:
            found["filled"] = filler.must("fill", 60, leave=1 << 30)
        found["left"] = _until(lambda: card.free() > 0.9 * card.total())
        begun = time.monotonic()
        found["next"] = kernel.run(RIGHT, 90)
        found["next_s"] = round(time.monotonic() - begun, 2)
        found["off_again_s"] = _until(lambda: card.of(kernel.pid) is None)
        with other("filler") as filler:
            filler.must("fill", 60, leave=256 << 20)
            found["holder"] = filler.pid
            number = kernel.send("ran = True\nprint('it ran')")
            time.sleep(3)
            found["still_off"] = card.of(kernel.pid) is None
            kernel.manager.interrupt_kernel()
            found["refused"] = kernel.reply(number, 60)
            found["off_after_interrupt"] = card.of(kernel.pid) is None
        found["last"] = kernel.run(RIGHT + "\nprint('ran' in globals())", 90)
    finally:
        kernel.end()
    return found


def _until(true: Any) -> float | None:
    begun = time.monotonic()
    while time.monotonic() < begun + PATIENCE:
        if true():
            return round(time.monotonic() - begun, 2)
        time.sleep(0.1)
    return None


def rehearsed() -> dict[str, Any]:
    """Without a GPU nothing can be shown of it: what a run that is right would say."""
    ok = {"status": "ok", "text": "RIGHT\nFalse\n"}
    return {
        "total": 1 << 40, "holder": 7, "begun": ok, "before": 1, "off_s": 3.0, "filled": {"held": 1 << 40, "free": 1},
        "left": 0.1, "next": ok, "next_s": 1.0, "off_again_s": 3.0, "still_off": True, "off_after_interrupt": True,
        "last": ok, "refused": {"status": "error", "text": "held by 1 GiB python (PID 7, me)\nNotRun: "},
    }  # fmt: skip
