"""The command line: one file per command, imported when the command is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

try:
    from memguard import __version__
    from memguard.errors import MemguardError, ProblemsError
except ImportError as error:
    from memguard.cli.support import damaged

    raise SystemExit(damaged.text(error)) from None

_COMMANDS = (
    "check",
    "doctor",
    "leases",
    "plan",
    "ps",
    "reclaim",
    "replay",
    "report",
    "resume",
    "run",
    "schema",
    "simulate",
    "suggest",
    "suspend",
    "top",
)
_ANSWERS = ("doctor", "reclaim", "replay", "resume", "simulate", "suggest", "suspend")
"""Those whose exit code 1 is an answer: what keeps them from answering is 2."""


class _Group(click.Group):
    """Finds the commands by file name, and turns memguard's errors into text and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"memguard.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's, which knows no near name of commands that are imported when they are used."""
        if args and args[0][:1].isalnum() and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            import difflib

            near = difflib.get_close_matches(args[0].lower(), _COMMANDS, 1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *,
        standalone_mode: bool = True,
        **more: Any,
    ) -> Any:
        """As click's. Alone it exits with the code, and all that is printed goes through `printing`."""
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **more)
        try:
            from memguard.cli.support import printing
        except ImportError as error:
            from memguard.cli.support import damaged

            sys.exit(damaged.text(error))
        sys.exit(printing.safely(lambda: self._alone(args, prog_name, **more)))

    def _alone(self, args: Sequence[str] | None, prog_name: str | None, **more: Any) -> Any:
        try:
            return super().main(args, prog_name, standalone_mode=False, **more)
        except click.ClickException as error:
            error.show(sys.stderr)
            return error.exit_code
        except click.Abort:  # Ctrl-C before there was a command
            return 130

    def invoke(self, ctx: click.Context) -> Any:
        from memguard.cli.support import printing

        try:
            return super().invoke(ctx)
        except printing.Unwritable as error:
            error.code = 2 if ctx.invoked_subcommand in _ANSWERS else 1
            raise
        except MemguardError as error:
            # A budget's problems begin with file:line:column, which editors and terminals turn into links.
            click.echo(f"{error}" if isinstance(error, ProblemsError) else f"memguard: {error}", err=True)
            ctx.exit(error.exit_code)
        except ImportError as error:
            from memguard.cli.support import damaged

            if not damaged.explains(error):
                raise
            click.echo(damaged.text(error), err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo(err=True)  # the terminal shows ^C on a line of its own
            ctx.exit(130)


@click.command("memguard", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memguard", message="%(prog)s %(version)s")
def main() -> None:
    """GPU memory budgets for Python processes that mix TensorFlow, PyTorch, JAX, CuPy, PyCUDA and Numba.

    Exit codes: 2 an invalid budget, trace, timeline or command line; 3 no GPU to budget; 141 the reader of the output
    left; 1 anything else.
    """
