"""The option that names simulated GPUs: the same in every command that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from memguard.cli.support import complete

F = TypeVar("F", bound=Callable[..., Any])


class _Gpus(click.Option):
    """Lists what it takes in its help, which is read only then."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from memguard._devices import catalog

        self.help = f"A simulated GPU; repeat for several. One of {catalog.names()} (docs/simulation.md)."
        return super().get_help_record(ctx)


def option(flag: str, name: str) -> Callable[[F], F]:
    return click.option(flag, name, cls=_Gpus, multiple=True, metavar="GPU", shell_complete=complete.gpus)
