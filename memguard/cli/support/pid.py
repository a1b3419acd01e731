"""PIDs as arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

MOST = (1 << 31) - 1

# Click's types take a parameter since 8.4. Older ones cannot be subscripted.
if TYPE_CHECKING:
    _Whole = click.ParamType[int]
else:
    _Whole = click.ParamType


class Pid(_Whole):
    """A whole number from 1 on."""

    name = "pid"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 11 and 0 < int(text) <= MOST):
            self.fail(
                f"{text[:40]!r} is not the number of a process, such as 4711; `memguard ps` lists them", param, ctx
            )
        return int(text)
