"""A real Jupyter kernel whose cells a test runs, each with a time limit."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Any

from support.suspend_children import away_again, surroundings

TEXT = 4000  # Maximum characters kept of a cell's output: a progress line is rewritten again and again.


class Kernel:
    """Runs cells through jupyter_client, each with a time limit."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self.manager, self.pid = KernelManager(), 0
        self.client: Any = None

    def start(self) -> None:
        self.manager.start_kernel(env=surroundings())
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=90)
        self.pid = int(self.run("import os; print(os.getpid())", 60)["text"])

    def send(self, code: str) -> str:
        return str(self.client.execute(code))

    def reply(self, number: str, limit: float) -> dict[str, Any]:
        """A cell's output and status; `status` is None if it does not finish in time."""
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
        """The content of the reply to this request. Late replies to earlier requests are dropped."""
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
