"""`memguard check`: is this budget file right?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from memguard.cli.support import budget_file, complete, options

if TYPE_CHECKING:
    from fractions import Fraction

    from memguard._budget import (
        Budget,
        DeviceBudget,
        DeviceOverride,
        FrameworkBudget,
        MetricsConfig,
        MonitorConfig,
        SuspendConfig,
    )
    from memguard.errors import ConfigError


_WARNING = "warning"


@click.command("check")
@click.argument(
    "budgets",
    metavar="[BUDGET]...",
    nargs=-1,
    type=click.Path(),
    shell_complete=complete.budgets,
    callback=options.budget_name,
)
@options.budget("The budget file, as the argument BUDGET.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema (2020-12) of budget files instead, for editors.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: for each file its problems and warnings.")
@click.pass_context
def check(context: click.Context, budgets: tuple[str, ...], budget: str | None, schema: bool, as_json: bool) -> None:
    """Validate budget files. Errors name the line and the fix. Needs no GPU.

    BUDGET is a file, or - for standard input; by default budget.yaml in this folder or one above. Every problem of
    every file is printed.

    Exit code 0: all are right; 2: at least one is wrong.
    """
    from memguard.errors import ConfigError

    if schema:
        if budgets or budget is not None or as_json:
            raise click.UsageError("--schema prints the schema and checks no file: leave the rest out")
        from memguard._budget import json_schema

        click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return
    if budget is not None or not budgets:
        named = budget_file.one(budgets[0] if budgets else None, budget)
        budgets = (named or str(budget_file.nearest("memguard check FILE")),)
    if budgets.count(budget_file.STDIN) > 1:
        raise click.UsageError("standard input can be read only once: give - once")
    found, wrong = [], False
    for path in budgets:
        name = budget_file.name(path)
        try:
            summary = list(_summary(budget_file.load(path)))
        except ConfigError as error:
            wrong = True
            found.append(_as_dict(name, error, ()))
            if not as_json:
                click.echo(str(error), err=True)
            continue
        found.append(_as_dict(name, None, [text for label, text in summary if label == _WARNING]))
        if not as_json:
            click.echo(f"{click.format_filename(name)}: ok")
            for label, text in summary:
                click.echo(f"  {label:<12} {text}")
    if as_json:
        click.echo(json.dumps({"memguard_check": 1, "ok": not wrong, "files": found}, indent=2))
    context.exit(ConfigError.exit_code if wrong else 0)


def _as_dict(name: str, error: ConfigError | None, warnings: Sequence[str]) -> dict[str, object]:
    """Of what is not known of a problem the value is None: there is no line in an empty file."""
    problems = () if error is None else error.problems
    return {
        "file": name,
        "ok": error is None,
        "problems": [
            {
                "line": problem.line,
                "column": problem.column,
                "path": problem.path or None,
                "message": problem.message,
                "fix": problem.fix or None,
            }
            for problem in problems
        ],
        "warnings": list(warnings),
    }


def _summary(budget: Budget) -> Iterator[tuple[str, str]]:
    from memguard._budget.values import text

    yield "device", _device(budget.device)
    for key, override in budget.devices.items():
        name = f"GPU {key}" if key.isdecimal() else key if key.startswith("GPU-") else repr(key)
        yield "", f"{name}: {_device(override)}"
    for name, framework in budget.frameworks.items():
        yield name, _framework(name, framework)
    yield "unallocated", _rest(budget)
    if budget.strategy == "pool":
        from memguard._budget import shared_pool

        names = " and ".join(shared_pool.members(budget))
        yield "strategy", f"pool: {names} draw from one pool, of the sum of their parts"
    if budget.on_busy == "raise":
        yield "on_busy", "raise: init fails if others hold so much of a GPU that the limit cannot be had"
    if budget.ranks is not None:
        yield "ranks", _ranks(budget.ranks)
    if budget.monitor is not None:
        yield "monitor", _monitor(budget.monitor)
        if budget.monitor.timeline is not None:
            size = text(budget.monitor.timeline_size)
            yield "timeline", f"{budget.monitor.timeline}, at most {size}"
            yield from _timeline_folder(budget.monitor.timeline)
        if budget.monitor.top:
            yield "top", "memguard top of the same user may watch, and ask for a trim or another cap"
    if budget.on_pressure:
        yield "on_pressure", f"{' and '.join(budget.on_pressure)} when the pressure becomes critical"
    if budget.metrics is not None:
        yield "metrics", _metrics(budget.metrics)
    if budget.suspend is not None:
        yield "suspend", _suspend(budget.suspend)
    if budget.doctor is not None:
        yield "doctor", f"leaves out {', '.join(budget.doctor.ignore)}"


def _ranks(ranks: int | str) -> str:
    if ranks == "auto":
        return "auto: ranks of torchrun, mpirun and srun that use the same GPU divide its limit"
    return f"{ranks} processes share each GPU, and divide its limit" if ranks != 1 else "each has its GPU for itself"


def _timeline_folder(timeline: str) -> Iterator[tuple[str, str]]:
    import os

    from memguard._budget.ranks import rank_of
    from memguard._timeline.files import expand

    folder = os.path.dirname(expand(timeline, os.getpid(), rank_of(os.environ)))
    there = os.path.isdir(folder)
    if not there or not os.access(folder, os.W_OK | os.X_OK):
        wrong = "cannot be written to" if there else "does not exist"
        yield _WARNING, f"the timeline's folder {folder} {wrong}: here init would fail, and cap nothing"


def _monitor(monitor: MonitorConfig) -> str:
    from memguard._budget.values import duration_text, percent_text

    levels = f"warn from {percent_text(monitor.warn)}, critical from {percent_text(monitor.critical)}"
    forecast = f"forecast {duration_text(monitor.forecast)} ahead" if monitor.forecast else "no forecast"
    return f"every {duration_text(monitor.interval)}, {levels}, {forecast}"


def _metrics(metrics: MetricsConfig) -> str:
    who = [f"Prometheus at 127.0.0.1:{metrics.prometheus}"] if metrics.prometheus is not None else []
    who += ["OpenTelemetry"] if metrics.opentelemetry else []
    return f"for {' and '.join(who)}, job {metrics.job or 'called as the script'}"


def _suspend(suspend: SuspendConfig) -> str:
    from memguard._budget.values import duration_text

    parts = ["when it asks for it"]
    if suspend.when_idle is not None:
        parts.append(f"in a notebook after {duration_text(suspend.when_idle)} without work")
    if suspend.by_others:
        parts.append("by other processes of the user")
    if suspend.on_demand is not None:
        parts.append(f"by a process that waits for its lease, after {duration_text(suspend.on_demand)} without work")
    return ", ".join(parts) + ("; host memory is not checked" if suspend.host_memory == "ignore" else "")


def _device(device: DeviceBudget | DeviceOverride) -> str:
    from fractions import Fraction

    from memguard._budget.values import duration_text, text

    parts = []
    if device.limit is not None:
        of = " of what CUDA can give" if isinstance(device.limit, Fraction) else ""
        parts.append(f"limit {text(device.limit)}{of}")
    if device.reserve is not None:
        parts.append(f"reserve {text(device.reserve)}")
    if getattr(device, "lease", False):
        wait = getattr(device, "wait", None)
        parts.append("leased" if wait is None else f"leased, waits up to {duration_text(wait)}")
        if getattr(device, "on_wait", None) == "suspend-idle":
            parts.append("asks idle holders to leave")
    return ", ".join(parts) or "as device"


def _framework(name: str, framework: FrameworkBudget) -> str:
    from memguard._budget.values import text
    from memguard._frameworks.specs import SPECS

    options = {option.name: getattr(framework, option.name) for option in SPECS[name].options}
    unsaid = "1 where each rank has a GPU of its own"  # a count that a budget for ranks leaves to them
    written = (f"{key}: {unsaid if value is None else str(value).lower()}" for key, value in options.items())
    size = _part(framework.guaranteed)
    if framework.max is not None:
        both = not isinstance(framework.guaranteed, int) and not isinstance(framework.max, int)
        size = f"min {text(framework.guaranteed) if both else size}, max {_part(framework.max)}"
    return ", ".join([size, *written])


def _part(part: Fraction | int) -> str:
    from fractions import Fraction

    from memguard._budget.values import text

    return f"{text(part)} of (limit − reserve)" if isinstance(part, Fraction) else f"{text(part)}"


def _rest(budget: Budget) -> str:
    from fractions import Fraction

    from memguard._budget.values import text

    parts = [framework.guaranteed for framework in budget.frameworks.values()]
    share = 1 - sum((part for part in parts if isinstance(part, Fraction)), Fraction(0))
    size = sum(part for part in parts if isinstance(part, int))
    if not share:
        return "nothing"
    lent = ", of which elastic shares get what they ask for, up to their max" if _elastic(budget) else ""
    whole = "(limit − reserve)" if share == 1 and size else f"{text(share)} of (limit − reserve)"
    fails = "" if not size or _known(budget) else "; init fails on a GPU where that is negative"
    return whole + (f" − {text(size)}" if size else "") + lent + fails


def _known(budget: Budget) -> bool:
    """Whether (limit − reserve) is the same on every GPU: then what does not fit is an error of the file."""
    device = budget.device
    return isinstance(device.limit, int) and isinstance(device.reserve, int) and not budget.devices


def _elastic(budget: Budget) -> bool:
    from memguard._frameworks.specs import NEVER_GIVE_BACK

    return any(part.min is not None and name not in NEVER_GIVE_BACK for name, part in budget.frameworks.items())
