"""The command line: one file per command, found by discovery and imported when the command is used.

The module `memguard/cli/NAME.py` defines the command `NAME`. `support/options.py` has the options that several commands
share, `support/exit_codes.py` the exit codes of all.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import click

try:
    from memguard import __version__
    from memguard.errors import MemguardError, ProblemsError
except ImportError as error:
    from memguard.cli.support import damaged

    print(damaged.text(error), file=sys.stderr)
    raise SystemExit(4) from None

from memguard.cli.support import exit_codes

_MOVED = {"simulate": "memguard replay", "schema": "memguard check --schema", "reclaim": "memguard top --once"}
"""Commands of 0.1, and what replaces them."""
_RENAMED = {
    "--simulate": ("--device", "--device"),
    "--for": ("--device", "--device"),
    "--budget": ("--config", "-c"),
    "--html": ("--format", "-o FILE.html"),
    "--md": ("--format", "-o FILE.md"),
    "--csv": ("--format", "-o FILE.csv"),
    "--perfetto": ("--format", "-o FILE.json"),
}
"""Options of 0.1: the option that a command with the replacement has, and the replacement."""


class _Group(click.Group):
    """Finds the commands by file name, and turns memguard's errors into text and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = getattr(importlib.import_module(f"memguard.cli.{cmd_name}"), cmd_name)
        if command.short_help is None:  # the whole sentence: click would cut it at 45 characters
            first = " ".join((command.help or "").partition("\n\n")[0].split())
            command.short_help = first.partition(". ")[0].partition(": memguard ")[0].rstrip(".") + "."
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's, which knows no near name of commands that are imported when they are used."""
        if args and args[0][:1].isalnum() and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            import difflib

            if (instead := _MOVED.get(args[0])) is not None:
                ctx.fail(f"{args[0]!r} is now `{instead}`")
            near = difflib.get_close_matches(args[0].lower(), self.list_commands(ctx), 1)
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

            print(damaged.text(error), file=sys.stderr)
            sys.exit(exit_codes.UNKNOWN)
        sys.exit(printing.safely(lambda: self._alone(args, prog_name, **more)))

    def _alone(self, args: Sequence[str] | None, prog_name: str | None, **more: Any) -> Any:
        try:
            return super().main(args, prog_name, standalone_mode=False, **more)
        except click.ClickException as error:
            shown = _with_successor(error) if isinstance(error, click.NoSuchOption) else error
            shown.show(sys.stderr)
            return error.exit_code
        except click.Abort:  # Ctrl-C before there was a command
            return exit_codes.INTERRUPTED

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemguardError as error:
            # A budget's problems begin with file:line:column, which editors and terminals turn into links.
            click.echo(f"{error}" if isinstance(error, ProblemsError) else f"memguard: {error}", err=True)
            ctx.exit(error.exit_code)
        except ImportError as error:
            from memguard.cli.support import damaged

            if not damaged.explains(error):
                raise
            click.echo(damaged.text(error), err=True)
            ctx.exit(exit_codes.UNKNOWN)
        except KeyboardInterrupt:
            click.echo(err=True)  # the terminal shows ^C on a line of its own
            ctx.exit(exit_codes.INTERRUPTED)


def _with_successor(error: click.NoSuchOption) -> click.UsageError:
    """What the option of 0.1 has become, instead of click's guess by name."""
    needed, instead = _RENAMED.get(error.option_name, ("", ""))
    parameters = error.ctx.command.params if error.ctx is not None else []
    if any(needed in parameter.opts for parameter in parameters):
        return click.UsageError(f"{error.option_name} is now `{instead}`", error.ctx)
    return error


@click.command("memguard", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memguard", message="%(prog)s %(version)s")
def main() -> None:
    """GPU memory budgets for Python processes that mix TensorFlow, PyTorch, JAX, CuPy, PyCUDA and Numba.

    Exit codes, the same in every command: 0 yes, or done; 1 no; 2 the command line or a file is invalid, or the output
    cannot be written; 3 no NVIDIA driver or GPU; 4 the answer could not be found out; 130 Ctrl-C; 141 the reader of the
    output left. `memguard run` ends with its command's own.
    """
