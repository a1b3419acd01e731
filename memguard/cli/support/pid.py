"""PIDs as arguments."""

from __future__ import annotations

import click

MOST = (1 << 31) - 1


class Pid(click.ParamType[int]):
    """A whole number from 1 on."""

    name = "pid"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 11 and 0 < int(text) <= MOST):
            self.fail(
                f"{text[:40]!r} is not the number of a process, such as 4711; `memguard ps` lists them", param, ctx
            )
        return int(text)
