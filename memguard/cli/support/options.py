"""Options and arguments that several commands have: the same flag, type and help in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memguard.cli.support import complete

F = TypeVar("F", bound=Callable[..., Any])
MOST_PID = (1 << 31) - 1

# Click's types take a parameter since 8.4. Older ones cannot be subscripted.
if TYPE_CHECKING:
    _Whole = click.ParamType[int]
    _Number = click.ParamType[float]
else:
    _Whole = _Number = click.ParamType


class Pid(_Whole):
    """A PID: a whole number from 1 on."""

    name = "pid"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 11 and 0 < int(text) <= MOST_PID):
            self.fail(
                f"{text[:40]!r} is not the number of a process, such as 4711; `memguard ps` lists them", param, ctx
            )
        return int(text)


class Duration(_Number):
    """A time such as 500ms, 30s or 10min, in seconds. `least` and `most` bound it."""

    name = "duration"

    def __init__(self, least: str, most: str) -> None:
        self._least, self._most = least, most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from memguard._base.units import parse_duration

        if isinstance(value, float):
            return value
        try:
            seconds = parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not parse_duration(self._least) <= seconds <= parse_duration(self._most):
            self.fail(f"{value} is not between {self._least} and {self._most}", param, ctx)
        return seconds


def duration(flag: str, about: str, *, least: str, most: str, default: str | None = None) -> Callable[[F], F]:
    """An option of type `Duration`."""
    kind, shown = Duration(least, most), default is not None
    return click.option(flag, type=kind, metavar="DURATION", default=default, show_default=shown, help=about)


def budget_name(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """A callback of options and arguments that name budgets: an empty name is an error and not the nearest budget.

    Shells turn `-c "$BUDGET"` into one if the variable is unset.
    """
    if "" in (value if isinstance(value, tuple) else (value,)):
        raise click.UsageError("the name of the budget is empty", context)
    return value


def _budget_file(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if value == "-":
        raise click.UsageError("standard input is not possible here: name a file", context)
    return budget_name(context, parameter, value)


def budget(
    about: str = "The budget file; by default budget.yaml in this folder or one above.", *, stdin: bool = True
) -> Callable[[F], F]:
    """The option `-c`. `stdin`: the command also reads the budget from standard input, for `-`."""
    return click.option(
        "-c",
        "--config",
        "budget",
        type=click.Path(),
        metavar="BUDGET",
        shell_complete=complete.budgets,
        callback=budget_name if stdin else _budget_file,
        help=about,
    )


class _Gpus(click.Option):
    """Computes the list of GPUs in its help only when the help is printed."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from memguard._devices import catalog

        self.help = f"A simulated GPU; repeat for several. One of {catalog.names()} (docs/simulation.md)."
        return super().get_help_record(ctx)


devices = click.option("--device", "devices", cls=_Gpus, multiple=True, metavar="GPU", shell_complete=complete.gpus)
"""Simulated GPUs instead of real ones."""
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
force = click.option("--force", is_flag=True, help="With -o: replace files that exist.")
