"""README's ledger and table, docs/results.md and the tables of docs/exchange.md, made from the committed results, and
the figures in the sentences of all documents (`_figures.py`).

python benchmarks/table.py            # write them into those files, between their markers
python benchmarks/table.py --status   # print which results are stale; fails if the documents do not say so
python benchmarks/table.py --release  # the same; fails also if any is stale, lacks checks of today's list, is missing

A result is STALE if `memguard/` has changed since it was measured (`is_stale`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _elastic_table
import _exchange_tables
import _figures
import _suggest_table
import _suspend_table
import _ways
from _listed import FILES, lacking, list_of, not_measured
from _run import RESULTS, ROOT, is_stale, numba_note
from checks import peers_rounds

LABELS = {**_exchange_tables.PLAIN, "tensorflow": "TensorFlow ¹"}
STALE = "STALE: memguard has changed since this was measured."
MIB, GIB = 1 << 20, 1 << 30
WITH_NUMBA = ("main_job", "watch", "readings", "moment", "exchange", "peers", "elastic", "suspend")
"""Programs that put np.row_stack back for Numba, and whose sections do not say so themselves."""


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def stale(result: dict[str, Any]) -> bool:
    """Whether memguard has changed since this was measured."""
    return is_stale(result["about"])


def short(exception: str | None) -> str:
    return "nothing" if exception is None else exception.removeprefix("builtins.").split(".")[-1]


def linked(name: str, folder: str = "../") -> str:
    """A link to a result, from docs/ or from where `folder` says."""
    return f"[{name}]({folder}benchmarks/results/{name})"


def origin(name: str, result: dict[str, Any]) -> list[str]:
    """What measured the result, when, on which source, how often, and the checks that did not pass."""
    about, lacks = result["about"], lacking(result)
    line = (
        f"{counted(result)} checks passed, {about['date'][:10]}: `{about['command']}`, {linked(name)}, "
        f"of memguard {about['memguard_hash']}."
    )
    if lacks:
        line += f" It lacks {checks_of(lacks)}, which count as not passed: {'; '.join(lacks)}."
    program = about["command"].partition("benchmarks/")[2].partition(".py")[0]
    numba = _exchange_tables.about_numba(about) if program in WITH_NUMBA else ""
    return [line + numba + reruns(result) + (f" **{STALE}**" if stale(result) else ""), *missed(result)]


def counted(result: dict[str, Any]) -> str:
    """How many of the checks of today's list passed. A check that a result lacks did not."""
    checks = result.get("checks", {})
    listed = list_of(result) or list(checks)
    return f"{sum(1 for name in listed if name in checks and checks[name][0])} of {len(listed)}"


def checks_of(lacks: list[str]) -> str:
    return f"{len(lacks)} {'check' if len(lacks) == 1 else 'checks'} of today's list"


def reruns(result: dict[str, Any]) -> str:
    """What earlier runs of the same code came to, if there were any."""
    runs = result.get("earlier_runs", ())
    if not runs:
        return ""
    said = [f"run {number} had {len(run['failed'])} failed" for number, run in enumerate(runs, 1)]
    return f" This is run {len(runs) + 1} of this code; {', '.join(said)}."


def held_to(one: dict[str, Any]) -> str:
    """How the ledger compares with what others know, if that was measured."""
    if "raw" not in one or "emptied" not in one:
        return ""
    off = max(abs(r["unaccounted"][1] - r["unaccounted"][0] - r["bytes"]) for r in one["raw"])
    sizes = ", ".join(f"{r['bytes'] / MIB:.0f}" for r in one["raw"])
    apart = max(abs(e["held"][0] - e["held"][1] - e["nvml"][0] + e["nvml"][1]) for e in one["emptied"].values())
    names = ", ".join(_exchange_tables.PLAIN[name] for name in one["emptied"])
    return (
        f"{sizes} MiB taken past every framework are unaccounted within {off / MIB:.1f} MiB; what {names} held is what "
        f"the driver has back within {apart / MIB:.1f} MiB"
    )


def samples(nvml: dict[str, Any]) -> str:
    """The most bytes of a process, and how often and how closely it was looked at."""
    return (
        f"at most {nvml['max_bytes'] / GIB:.2f} GiB in {nvml['samples']:,} samples, at most "
        f"{nvml['longest_gap_ms']:.0f} ms apart"
    )


def missed(*results: dict[str, Any]) -> list[str]:
    """The checks that did not pass, each with its figure."""
    failed = [f"{name}: {what}" for result in results for name, (ok, what) in result["checks"].items() if not ok]
    return ["", "**Missed:**", "", *(f"- {line}" for line in failed)] if failed else []


def main_job() -> list[str]:
    result = load("h200-main-job.json")
    about, scenarios = result["about"], result["scenarios"]
    before, after = scenarios["without_memguard"], scenarios["together"]
    versions, nvml = about["versions"], after["nvml"]
    pair = scenarios["torch_and_pycuda"]["readings"]
    worst = max((reading["unaccounted"] for reading in pair), key=abs)

    def with_it(name: str) -> str:
        outcome = after["driven"][name]
        most, cap = outcome["most_held"] / MIB, outcome["cap"] / MIB
        return f"stops at {most:,.0f} of {cap:,.0f} MiB: `{short(outcome['phases'][0]['exception'])}`"

    def without(name: str) -> str:
        text = before[name].get("text", "").split("\n")[0]
        if "ASSERT" in text:
            text = "INTERNAL ASSERT FAILED … please report a bug to PyTorch"
        return f"dies: `{short(before[name]['exception'])}`: {text[:60]}"

    took, left = before["tensorflow_took"] / MIB, before["left_free"] / GIB
    ledgers = f"{len(after['readings'] + pair)} ledgers"
    unaccounted = f"unaccounted {worst / MIB:+.0f} MiB at worst with PyTorch and PyCUDA live"
    told = "; ".join(part for part in (ledgers, unaccounted, held_to(after)) if part)
    signal, cured = -scenarios["order_control"]["returncode"], scenarios["order_cured"]["multiprocessors"]
    rows = [
        ("", "without memguard", "with memguard, each asked for more until it refused"),
        ("---", "---", "---"),
        ("TensorFlow ¹", f"takes {took:,.0f} MiB at its first operation", with_it("tensorflow")),
        ("PyTorch", without("torch"), with_it("torch")),
        ("PyCUDA", without("pycuda"), with_it("pycuda")),
        ("the process, by NVML", f"leaves {left:.1f} GiB of the card", samples(nvml)),
        ("who holds the memory", "nothing says", told),
        (
            "`import tensorflow` before `import torch`",
            f"first matrix product dies of signal {signal}",
            f"works, {cured} multiprocessors seen",
        ),
    ]
    return [
        "## Three frameworks under one limit",
        "",
        f"One process on an {about['gpu']}, limit 40 GiB. Without memguard TensorFlow goes first, then each of "
        "the others asks for 4 GiB.",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"¹ TensorFlow {versions['tensorflow']}, {about['tensorflow_build']}. PyTorch {versions['torch']}, "
        f"PyCUDA {versions['pycuda']}, driver {about['driver']}.",
        "",
        *origin("h200-main-job.json", result),
    ]


def light() -> list[str]:
    result = load("h200-light.json")
    ratio, init, plan = result["import"]["ratio"], result["init"], result["plan"]["plan_s"]
    control = result["import"]["control_against_itself"]
    alone, everything = init["init_s"], init["import_and_init_s"]

    def spread(value: dict[str, float]) -> str:
        return f"{value['median']:.2f} ({value['p5']:.2f}–{value['p95']:.2f})"

    def ms(value: dict[str, float]) -> str:
        return f"{value['median'] * 1e3:.2f} ms ({value['p5'] * 1e3:.2f}–{value['p95'] * 1e3:.2f})"

    return [
        "## Cost of the start",
        "",
        "| before any work | median (5 %–95 %) |",
        "| --- | --- |",
        f"| `import memguard`, as a ratio to `import pydantic, yaml` | {spread(ratio)}; "
        f"the control against itself {spread(control)} |",
        f"| `memguard.init`, no framework imported, its dependencies loaded | {ms(alone)} |",
        f"| the same in a fresh interpreter, imports of pydantic, PyYAML, nvidia-ml-py included | {ms(everything)} |",
        f"| a plan of 6 frameworks × 8 GPUs | {ms(plan)} |",
        "",
        *origin("h200-light.json", result),
    ]


def init_of_six() -> list[str]:
    if not measured("h200-init.json"):
        return []
    result = load("h200-init.json")
    said = {
        "init": "six frameworks and a monitor, pydantic, PyYAML and nvidia-ml-py loaded, no framework imported",
        "from source": "the same from source, without bytecode",
        "one GPU visible": "the same with CUDA_VISIBLE_DEVICES: a child process asks CUDA",
        "imported": "the six imported",
        "fresh": "a fresh interpreter, all imports of others included",
        "their imports": "the imports of others alone",
    }

    def spread(one: dict[str, float]) -> str:
        return f"{one['median_ms']:.1f} ms ({one['p5_ms']:.1f}–{one['p95_ms']:.1f})"

    ways = {way: result["ways"][way] for way in said if way in result["ways"]}
    return [
        "## What init takes",
        "",
        "| `memguard.init`, nvmlInit apart | median (5 %–95 %) | nvmlInit |",
        "| --- | --- | --- |",
        *(
            f"| {said[way]} | {spread(one['without_nvml_init'])} | {one['nvml_init']['median_ms']:.1f} ms |"
            for way, one in ways.items()
        ),
        "",
        *origin("h200-init.json", result),
    ]


def ranks() -> list[str]:
    if not measured("h200-x2-ranks.json"):
        return []
    result = load("h200-x2-ranks.json")

    def row(what: str, one: dict[str, Any]) -> list[str]:
        if not one.get("ranks") or not one.get("nvml"):  # it died: what it lacks stands with the checks
            return []
        pids = {str(rank["pid"]) for rank in one["ranks"]}
        sums = [sum(size or 0 for pid, size in found.items() if pid in pids) for found in one["nvml"].values()]
        held = max(rank["held"] for rank in one["ranks"]) / MIB
        cap = one["ranks"][0]["cap"] / MIB
        return [f"| {what} | {held:,.0f} of {cap:,.0f} MiB | {max(sums) / MIB:,.0f} of {16 * GIB / MIB:,.0f} MiB |"]

    return [
        "## Ranks of torchrun",
        "",
        "`ranks: auto`, limit 16 GiB of each of two GPUs; each rank is asked for more until it refuses:",
        "",
        "| | held by torch, of its cap | the ranks of a GPU together, by NVML |",
        "| --- | --- | --- |",
        *row("two ranks over NCCL, each on a GPU of its own", result["two"]),
        *row("four ranks over gloo, two on each GPU", result["four"]),
        "",
        *origin("h200-x2-ranks.json", result),
    ]


def live_screen() -> list[str]:
    if not measured("h200-top.json"):
        return []
    result = load("h200-top.json")

    def row(name: str, figure: str) -> list[str]:
        scenario, _, what = figure.partition(".")
        part = result[scenario].get(what)
        return [f"| {name} | {max(part):.1%} |"] if part else []

    kind = result["attached"].get("target", "")
    return [
        "## What the live screen costs",
        "",
        "| `memguard top`, 80×24, twice a second | of a core, the worse half |",
        "| --- | --- |",
        *row("following a timeline of six frameworks", "follows.shares"),
        *row(f"watching this machine and a process with {kind} GPUs", "attached.shares"),
        *row("textual with one line that changes as often (control)", "control.shares"),
        *row("the process that is watched", "attached.watched"),
        *row("the same process, not watched (control)", "attached.beside"),
        "",
        *origin("h200-top.json", result),
    ]


def leases() -> list[str]:
    if not measured("h200-leases.json"):
        return []
    result = load("h200-leases.json")
    one, control = (result["scenarios"].get(name, {}) for name in ("together", "control"))
    rows = [
        f"| {name} | {one['filled'][name] / GIB:.2f} GiB | {most / GIB:.2f} GiB |"
        for name, most in one.get("most", {}).items()
    ]
    fifth = one.get("fifth")
    waited = f"The fifth had its lease {fifth['after_told_s']:.2f} s after the first was told to end. " if fifth else ""
    names = ", ".join(name.rpartition(" ")[0] for name in control.get("died", ()))
    died = f"Without leases {len(control['died'])} of five died: {names}." if control.get("died") else ""
    return [
        "## Processes with leases",
        "",
        "| process, with a lease of 34 GiB | its arrays | by NVML, at most |",
        "| --- | --- | --- |",
        *rows,
        "",
        f"{waited}{died}",
        "",
        *_turns(result["scenarios"].get("turns", {})),
        *origin("h200-leases.json", result),
    ]


def _turns(one: Any) -> list[str]:
    """Two jobs on one card; nothing if they did not run."""
    if not one.get("filled") or not all(one["turns"].values()):
        return []
    last = {"first": one.get("alone")}  # it leaves once more, and comes back when the other has ended
    rows = []
    for name, turns in one["turns"].items():
        moved = last.get(name) or turns[-1]
        waits = ", ".join(f"{turn['served'] - turn['asked']:.0f}" for turn in turns)
        out, back = (", ".join(f"{end - begin:.0f}" for begin, end in moved[way]) or "never" for way in ("out", "back"))
        rows.append(f"| {name} | {one['filled'][name] / GIB:.2f} GiB | {waits} | {out} | {back} |")
    return [
        f"Two jobs with leases of 44 GiB take turns on {one['room'] / GIB:.1f} GiB, seconds:",
        "",
        "| job | its arrays | from asking to its turn, each time | out | in |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def gpu_tests() -> list[str]:
    lines = []
    for path in sorted(RESULTS.glob("*gpu-tests.json")):
        result = load(path.name)
        old = f" **{STALE}**" if stale(result) else ""
        lines.append(f"- {outcomes(result)}, {result['about']['date'][:10]}: {linked(path.name)}.{old}")
        lines += [f"    - {how}: {', '.join(f'`{name}`' for name in names)}"
                  for how, names in not_passed(result).items()]  # fmt: skip
    return ["## Tests on a GPU", "", "`tests/gpu`:", "", *lines]


def not_passed(result: dict[str, Any]) -> dict[str, list[str]]:
    """The tests that failed or were not run, and those that passed only when they ran again, by name."""
    found: dict[str, list[str]] = {}
    for name, outcome in result["results"].items():
        if outcome not in ("passed", "skipped"):
            found.setdefault(outcome, []).append(name)
    if again := later(result):
        found["failed in an earlier run of the same code"] = again
    return found


def later(result: dict[str, Any]) -> list[str]:
    """The tests that passed after they had failed in an earlier run of the same code."""
    earlier: dict[str, list[str]] = result.get("earlier", {})
    return [
        name
        for name, before in earlier.items()
        if result["results"][name] == "passed" and set(before) - {"passed", "skipped"}
    ]


def outcomes(result: dict[str, Any]) -> str:
    """How many tests passed and failed, how many passed only when they ran again, and on how many GPUs."""
    found, about, before = list(result["results"].values()), result["about"], later(result)
    again = f" ({len(before)} of them failed in an earlier run of the same code)" if before else ""
    others = [f", {count} {outcome}" for outcome in ("skipped", "not run") if (count := found.count(outcome))]
    return (
        f"{found.count('passed')} passed{again}, {found.count('failed')} failed{''.join(others)} on "
        f"{about['gpus']} × {about['gpu']}"
    )


def all_frameworks() -> list[str]:
    result, ddp = load("h200-all-frameworks.json"), load("h200-x2-ddp.json")
    versions, scenarios = result["about"]["versions"], result["scenarios"]
    # A short run leaves out the loop and the hour.
    six, loop, hour = scenarios["together"], scenarios.get("loop"), scenarios.get("simulated_hour")
    rows = []
    for name, label in LABELS.items():
        one = six["driven"][name]
        most, cap, refusals = one["most_held"] / MIB, one["cap"] / MIB, one["refusals"]
        rows.append(
            f"| {label} | {most:,.0f} of {cap:,.0f} MiB | `{short(refusals[0]['exception'])}`, {len(refusals)} times | "
            f"{loop['refused'][name] if loop else 'not measured'} |"
        )
    worst = max(six["readings"], key=lambda r: abs(r["unaccounted"]))
    took = [max(r["overhead"] for r in one["readings"]) / MIB for one in ddp["ranks"]]
    kept = ddp["ranks"][0]["reserve"] / MIB
    notes = [
        f"The process, by NVML: {samples(six['nvml'])}.",
        f"In {len(six['readings'])} ledgers {worst['unaccounted'] / MIB:+.0f} MiB are unaccounted at worst "
        "(TensorFlow's unseen pool in it).",
        *([f"{held_to(six)}."] if held_to(six) else ()),
    ]
    if loop:
        notes.append(
            f"In five minutes at the caps ({loop['allocated']:,} allocations, {loop['readings']} ledgers, TensorFlow "
            f"without growth) the process takes {samples(loop['nvml'])}, and unaccounted drifts by "
            f"{loop['unaccounted_drift'] / MIB:.0f} MiB."
        )
    if hour:
        notes.append(f"In a simulated hour unaccounted drifts by {hour['unaccounted_drift'] / MIB:.0f} MiB.")
    orders = next((one for name, one in result["checks"].items() if name.startswith("30 import orders")), None)
    if orders:
        notes.append(f"Orders of importing two frameworks, with both alive and capped: {orders[1]}.")
    return [
        "## All six frameworks under one limit",
        "",
        f"All six in one process, limit 40 GiB (caps {six['sum_of_caps'] / GIB:.2f} GiB together). Each is emptied and",
        "driven to its refusal while the other five are full:",
        "",
        "| | most held | refuses with | refusals in five minutes at the caps |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        *(f"- {note}" for note in notes),
        "",
        f"JAX {versions['jax']}, CuPy {versions['cupy-cuda13x']}, Numba-CUDA {versions['numba-cuda']}"
        f"{' ' + note if (note := numba_note(result['about'])) else ''}.",
        "",
        *origin("h200-all-frameworks.json", result),
        "",
        f"PyTorch DDP on two GPUs (NCCL): {took[0]:,.0f} and {took[1]:,.0f} MiB outside torch's cap at most, in a "
        f"reserve of {kept:,.0f} MiB.",
        "",
        *origin("h200-x2-ddp.json", ddp),
    ]


def watch() -> list[str]:
    result, timeline, startup = load("h200-watch.json"), load("replay.json"), load("startup.json")
    scenarios = result["scenarios"]
    reports = {name: one for name, one in scenarios.items() if one.get("report")}
    shown = scenarios["cupy, card full"]
    leak, saw, tick, ops = (scenarios[name] for name in ("leak", "sawtooth", "tick", "small ops"))
    ratio, control = ops["ratio"], ops["control"]
    start = startup["start"]
    armed = start["with"]["median_ms"] - start["without"]["median_ms"]
    return [
        "## Watching and out-of-memory reports",
        "",
        "An out-of-memory error as memguard explains it. CuPy asks; PyTorch and another process hold the card:",
        "",
        "```",
        *shown["printed"].splitlines(),
        "```",
        "",
        "| | measured |",
        "| --- | --- |",
        f"| real out-of-memory errors, at the framework's own cap and on a card that a sibling filled | "
        f"{len(reports)}, each with its report |",
        f"| a leak of 1 GiB a second from 20 GiB below the cap | announced {leak['announced_before_oom_s']} s before "
        "the error |",
        f"| a sawtooth workload, up to {max(saw['most'].values()):.0%} of its cap, at 10 Hz | {len(saw['alarms'])} "
        f"alarms in {saw['seconds_run'] / 60:.0f} minutes |",
        f"| one tick at work (sample, decision, ring, timeline, actions), all six live, 10 Hz | {a_tick(tick)} |",
        "| small PyTorch operations with the monitor at 10 Hz: their time as a ratio to without | "
        f"{ratio['median']:.4f} (95 %: {ratio['low']:.4f}–{ratio['high']:.4f}); without against without "
        f"{control['median']:.4f} ({control['low']:.4f}–{control['high']:.4f}), {ops['pairs']} pairs |",
        "",
        *origin("h200-watch.json", result),
        "",
        "Without a GPU:",
        "",
        "| | measured |",
        "| --- | --- |",
        *(
            f"| replay of a timeline of {run['samples']:,} samples of six frameworks | {run['seconds']:.1f} s, "
            f"{run['peak_rss_kib'] / 1024:.0f} MiB |"
            for run in timeline["runs"]
        ),
        f"| start of a Python that has memguard in its environment, without MEMGUARD_CONFIG | {armed:+.2f} ms |",
        "",
        *origin("replay.json", timeline),
        "",
        *origin("startup.json", startup),
    ]


def a_tick(tick: dict[str, Any]) -> str:
    """What a tick costs a program at work. A result from before that was measured has the ticks of an idle one only."""
    if "at_work" not in tick:
        return "not measured: the result has samples of an idle process, without ring, timeline and actions"
    cpu, wall = tick["at_work"]["cpu_us"], tick["at_work"]["wall_us"]
    return (
        f"{cpu['median']:.0f} µs of CPU (90 %: {cpu['p90']:.0f}); {wall['median']:.0f} ({wall['p90']:.0f}) with what "
        "it waits for the GIL"
    )


def readings() -> list[str]:
    if not measured("h200-readings.json"):
        return []
    result = load("h200-readings.json")

    def us(value: dict[str, float]) -> str:
        return f"{value['median']:.1f} ({value['low']:.1f}–{value['high']:.1f})"

    rows = [
        f"| {name} | {one['us']['median']:.1f} | {one['bare_us']['median']:.1f} | {us(one['above_us'])} | "
        f"{us(one['control_us'])} |"
        for name, one in result["scenarios"]["readings"]["readings"].items()
    ]
    return [
        "## Readings",
        "",
        "All six live and holding arrays. A bare probe is what must be asked whatever memguard does: NVML, the",
        "counters of each framework, the driver's context. Medians in µs, in brackets the 95 % interval:",
        "",
        "| reading | in all | its bare probes | above them | control: the probes to themselves |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"A tick of the monitor at 10 Hz, of a program at work: {a_tick(result['scenarios']['ticking'])}.",
        "",
        *origin("h200-readings.json", result),
    ]


def doctor() -> list[str]:
    result = load("h200-doctor.json")
    scenarios = result["scenarios"]

    def found(name: str) -> str:
        names = [f"`{n}` ({s})" if s and not s.startswith("GPU-") else f"`{n}`" for n, kind, s, _ in
                 scenarios[name]["findings"] if kind != "info"]  # fmt: skip
        return ", ".join(dict.fromkeys(names)) or "nothing"

    times = result["all_six_s"]
    rows = (
        ("the machine as it ships: PyTorch, JAX, CuPy, Numba", "as shipped"),
        ("with TensorFlow ¹ and PyCUDA added: six frameworks", "all six"),
        ("`CUDA_VISIBLE_DEVICES=7`", "no such GPU"),
        ("both of XLA's fractions set", "both XLA fractions"),
        ("`TF_GPU_ALLOCATOR=cuda_malloc_async` under a budget ¹", "async allocator with a limit"),
        ("`import torch, pycuda.autoinit`", "second context"),
        ("PyTorch, then the toolkit's own libcudart by its path", "two copies of a library"),
        ("a program that imports TensorFlow ¹ before PyTorch", "TensorFlow before PyTorch"),
        ("another process holds all but 320 MiB", "a full card"),
    )
    return [
        "## Doctor",
        "",
        "`memguard doctor` on an H200:",
        "",
        "| what was done | findings above info |",
        "| --- | --- |",
        *(f"| {what} | {found(name)} |" for what, name in rows),
        "| the doctor's time: six frameworks, each in its own process, and two processes with several | "
        f"{times['median']:.1f} s (median of {len(times['runs'])}; at most {max(times['runs']):.1f} s) |",
        "",
        *origin("h200-doctor.json", result),
    ]


def exchange() -> list[str]:
    result, two = load("h200-exchange.json"), load("h200-x2-exchange.json")
    return [
        "## Exchange",
        "",
        "Every pair is in [exchange.md](exchange.md).",
        "",
        *_exchange_tables.in_short(result, two),
        "",
        *origin("h200-exchange.json", result),
        "",
        *origin("h200-x2-exchange.json", two),
    ]


def measured(name: str) -> bool:
    return (RESULTS / name).exists()


def absent() -> dict[str, list[str]]:
    """The results that nobody measured, each with the names of its checks."""
    return not_measured([path.name for path in RESULTS.glob("*.json")])


def moment() -> list[str]:
    """Nothing before it was measured: these tables are newer than the others."""
    if not measured("h200-moment.json"):
        return []
    result = load("h200-moment.json")
    rows = []
    for name, one in result["programs"].items():
        report, followed = one.get("report"), one["followed"]
        wrong = ", ".join(field for field, (right, _) in one["fields"].items() if not right)
        if report is None:
            said, asked = "no report", "–"
        else:
            said, asked = report["why"], report["requested"]
            asked = "not said" if asked is None else f"{asked / MIB:,.0f} MiB"
        helped = "not tried"
        if followed["tried"]:
            helped = f"{followed['advice'].partition(', or ')[0]}: {'helps' if followed['helped'] else '**no help**'}"
        judged = f"**wrong: {wrong}**" if wrong else "all right"
        rows.append(f"| {name.replace('_', ' ')} | {asked} | {said} | {judged} | {helped} |")
    quiet = [
        f"| {name.replace('_', ' ')} | {one.get('asked_seconds', 0):.0f} s | {len(one.get('alarms', ()))} |"
        for name, one in result["quiet"].items()
    ]
    return [
        "## The moment of an out-of-memory error",
        "",
        f"{len(rows)} ordinary programs ([moment_programs](../benchmarks/moment_programs)) run out of memory. Reason,",
        "requester, bytes, largest holder and advice are judged against what was arranged. Then the advice is",
        "followed:",
        "",
        "| program | asked for | why, as memguard says it | judged | advice, followed |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        "Programs that are in order, under a monitor with its defaults:",
        "",
        "| program | ran for | alarms |",
        "| --- | --- | --- |",
        *quiet,
        "",
        *origin("h200-moment.json", result),
    ]


def their_tests() -> list[str]:
    if not measured("h200-their-tests.json"):
        return []
    result = load("h200-their-tests.json")
    versions = result["about"]["versions"]
    rows = []
    for name, suite in result["suites"].items():
        package = {"numba": "numba-cuda"}.get(name, name)
        label = f"{'Numba-CUDA' if name == 'numba' else LABELS[name]} {versions.get(package, '')}".strip()
        note = numba_note(result["about"]) if name == "numba" else None
        label += f" {note}" if note else ""
        differ = "; ".join(f"`{one['test']}`: {one['reason'] or '**no reason**'}" for one in suite["differences"])
        rows.append(f"| {label} | {suite['run']} | {len(suite['passed'])} | {differ or 'none'} |")
    return [
        "## The frameworks' own tests",
        "",
        "Without memguard and under `memguard run`, outcome by outcome:",
        "",
        "| | tests run both ways | pass both ways | differ |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        *origin("h200-their-tests.json", result),
    ]


def peers() -> list[str]:
    if not measured("h200-peers.json"):
        return []
    result = load("h200-peers.json")
    shares = " / ".join(f"{share * 100:g}" for share in _ways.SHARES)
    rows, lacking = [], []
    for library, ways in result["ways"].items():
        for way, says in ways.items():
            if way.endswith(_ways.AGAIN):
                continue
            name = f"{LABELS[library]}, {way}: {says}"
            if way in result["missing"][library]:
                lacking.append(f"- {name}: {result['missing'][library][way]}")
                continue
            cells = []
            for size in _ways.SIZES:
                found = [result["cells"][library].get(_ways.cell(size, share), {}) for share in _ways.SHARES]
                times = [one.get("ways", {}).get(way, {}).get("both_us") for one in found]
                cells.append(" / ".join("–" if us is None else f"{us:.2f}" for us in times))
            compared = _ways.pairs(library).get(way)
            rows.append(f"| {name} | {' | '.join(cells)} | {_worst(result['cells'][library], way, compared)} |")
        for way, reason in result["not_there"][library].items():
            lacking.append(f"- {LABELS[library]}, {way}: {reason}")
    return [
        "## Cost of an allocation",
        "",
        f"Microseconds for an allocation and its end, with the library's memory at {shares} % of a cap of",
        f"{result['cap'] / GIB:g} GiB (without one: with as many bytes in live blocks). Medians of "
        f"{peers_rounds(result)} rounds or more in {result['generations']} generations of",
        "processes. The ratio is the highest of the nine, with its 95 % interval; the control is the same way in two",
        "processes, in the same place.",
        "",
        "| | " + " | ".join(_ways.cell(size, 0).partition(" at ")[0] for size in _ways.SIZES) + " | ratio at worst |",
        "| --- |" + " --- |" * (len(_ways.SIZES) + 1),
        *rows,
        "",
        *lacking,
        *(
            f"- {LABELS[one]} was measured in an earlier run, {when}"
            for one, when in result.get("taken_over", {}).items()
        ),
        *([""] if lacking or result.get("taken_over") else []),
        *origin("h200-peers.json", result),
    ]


def _worst(cells: dict[str, Any], way: str, compared: str | None) -> str:
    """The highest ratio of a way to what it is compared with, where that was, and the control there."""
    found = {where: one["ratios"][way]["both_us"] for where, one in cells.items() if way in one["ratios"]}
    if compared is None or not found:
        return "–"
    where = max(found, key=lambda name: found[name]["median"])
    spread, control = found[where], cells[where]["ratios"].get(compared + _ways.AGAIN)
    text = f"{spread['median']:.2f} ({spread['low']:.2f}–{spread['high']:.2f}) of {compared}, {where}"
    if control is not None:
        text += f"; control {control['both_us']['low']:.3f}–{control['both_us']['high']:.3f}"
    return text


def training() -> list[str]:
    if not measured("h200-training.json"):
        return []
    result = load("h200-training.json")

    def spread(value: dict[str, float]) -> str:
        return f"{value['median']:.4f} ({value['low']:.4f}–{value['high']:.4f})"

    rows = []
    for name, one in result["scenarios"].items():
        if "beyond" not in one:
            rows.append(f"| {name} | not measured: {one.get('skipped') or 'it failed'} | | | |")
            continue
        pairs = f"{one['pairs']} pairs of {one['steps']} steps of {one['step_ms']:.1f} ms"
        rows.append(
            f"| {one['says']} | {pairs} | {spread(one['ratio'])} | {spread(one['control'])} | {spread(one['beyond'])} |"
        )
    return [
        "## Cost of watching a training",
        "",
        "Time of training steps with a budget and a monitor at 10 Hz as a ratio to without, in the same process, in",
        "interleaved segments; medians with their 95 % intervals:",
        "",
        "| | measured | watched / without | without / without | watched / both without |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        *origin("h200-training.json", result),
    ]


def elastic() -> list[str]:
    if not measured("h200-elastic.json"):
        lacks = not_measured(set(FILES) - {"h200-elastic.json"})["h200-elastic.json"]
        return [
            "## No avoidable out-of-memory error",
            "",
            f"Elastic shares, reclaim, retry and `strategy: pool`: not measured yet. `benchmarks/elastic.py` has "
            f"{len(lacks)} checks.",
        ]
    result = load("h200-elastic.json")
    return [*_elastic_table.whole(result["scenarios"]), "", *origin("h200-elastic.json", result)]


def suspend() -> list[str]:
    if not measured("h200-suspend.json"):
        lacks = not_measured(set(FILES) - {"h200-suspend.json"})["h200-suspend.json"]
        return [
            "## A process steps off the card",
            "",
            f"`memguard.suspend`: not measured yet. `benchmarks/suspend.py` has {len(lacks)} checks.",
        ]
    result = load("h200-suspend.json")
    return [*_suspend_table.whole(result["scenarios"]), "", *origin("h200-suspend.json", result)]


def suggest() -> list[str]:
    if not measured("h200-suggest.json"):
        lacks = not_measured(set(FILES) - {"h200-suggest.json"})["h200-suggest.json"]
        return [
            "## A budget from a run",
            "",
            f"`memguard suggest`: not measured yet. `benchmarks/suggest.py` has {len(lacks)} checks.",
        ]
    result = load("h200-suggest.json")
    return [*_suggest_table.whole(result["scenarios"]), "", *origin("h200-suggest.json", result)]


def others() -> list[str]:
    """Results beyond the list, as of another kind of card: their checks, and those that were missed."""
    found = [path.name for path in sorted(RESULTS.glob("*.json")) if path.name not in FILES]
    if not found:
        return []
    lines = ["## Other runs"]
    for name in found:
        result = load(name)
        gpu = f"{result['about']['gpus']} × {result['about']['gpu']}" if result["about"]["gpu"] else "no GPU"
        lines += ["", f"On {gpu}:", "", *origin(name, result)]
    return lines


def exchange_document() -> str:
    """What stands between the markers of docs/exchange.md."""
    result = load("h200-exchange.json")
    return "\n".join(_exchange_tables.whole(result, f" **{STALE}**" if stale(result) else ""))


def overview() -> list[str]:
    """Every result, whether it is current, and how many of its checks passed."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        result = load(path.name)
        about, lacks = result["about"], lacking(result)
        gpus = f"{about['gpus']} × {about['gpu']}" if about["gpu"] else "no GPU"
        passed = counted(result) if result.get("checks") else "–"
        passed += f", lacks {len(lacks)}" if lacks else ""
        passed += f", run {len(result['earlier_runs']) + 1}" if result.get("earlier_runs") else ""
        state = "STALE" if stale(result) else "current"
        rows.append(f"| {linked(path.name)} | {gpus} | {about['date'][:10]} | {passed} | {state} |")
    rows += [f"| {name} | – | – | {f'0 of {len(lacks)}' if lacks else '–'} | not measured |"
             for name, lacks in absent().items()]  # fmt: skip
    return ["| result | on | measured | checks passed | |", "| --- | --- | --- | --- | --- |", *rows]


def results() -> str:
    """What stands between the markers of docs/results.md."""
    parts = (
        overview,
        main_job,
        all_frameworks,
        watch,
        readings,
        moment,
        exchange,
        doctor,
        their_tests,
        gpu_tests,
        light,
        peers,
        training,
        init_of_six,
        live_screen,
        leases,
        ranks,
        elastic,
        suspend,
        suggest,
        others,
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := part()))


def readme_ledger() -> str:
    result = load("h200-main-job.json")
    text = result["mixed_workload"]["ledger"]
    lines = [line.rstrip() for line in text.split("\nnote:")[0].splitlines()]
    old = f" {STALE}" if stale(result) else ""
    return "\n".join(
        [
            "```",
            *lines,
            "```",
            "",
            f"Printed by [mixed_workload.py](examples/mixed_workload.py) on {about_gpu(result)}, after work in all six",
            f"({linked('h200-main-job.json', '')}).{old}",
        ]
    )


def at_the_caps(loop: dict[str, Any]) -> str:
    return (
        f"{loop['allocated']:,} allocations, {sum(loop['refused'].values()):,} refusals, and unaccounted memory drifts "
        f"by {loop['unaccounted_drift'] / MIB:.0f} MiB"
    )


def about_gpu(result: dict[str, Any]) -> str:
    return f"an {result['about']['gpu']}, driver {result['about']['driver']}"


def readme_table() -> str:
    """At most twelve rows, each with the result that it comes from."""
    names = ("main-job", "all-frameworks", "watch", "exchange", "light")
    job, six, watched, handed, start = (load(f"h200-{name}.json") for name in names)
    alone, after = job["scenarios"]["without_memguard"], job["scenarios"]["together"]
    together, loop = six["scenarios"]["together"], six["scenarios"].get("loop")
    ops, speed = watched["scenarios"]["small ops"]["ratio"], handed["scenarios"]["speed"]
    slowest = max(one["memguard"]["median_us"] for one in speed["speed"].values())
    host = sorted(_exchange_tables.host_ms(speed, pair) for pair in speed["speed"])

    def stops(name: str) -> str:
        one = after["driven"][name]
        return f"{_exchange_tables.PLAIN[name]} at {one['most_held'] / MIB:,.0f} of {one['cap'] / MIB:,.0f} MiB"

    begun, source = start["init"]["init_s"]["median"] * 1e3, "light"
    if measured("h200-init.json"):  # of six frameworks and a monitor, without nvmlInit
        begun, source = load("h200-init.json")["ways"]["init"]["without_nvml_init"]["median_ms"], "init"

    rows = [
        (
            "Without memguard: TensorFlow, then PyTorch and PyCUDA",
            f"TensorFlow takes {alone['tensorflow_took'] / MIB:,.0f} MiB; PyTorch dies with "
            f"`{short(alone['torch']['exception'])}`, PyCUDA with `{short(alone['pycuda']['exception'])}`",
            "main-job",
        ),
        (
            "With a limit of 40 GiB, each asking until it is refused",
            f"{stops('tensorflow')}, {stops('torch')}, {stops('pycuda')}, each with its own error; the process, by "
            f"NVML, {samples(after['nvml'])}",
            "main-job",
        ),
        *([("The ledger against what others know", held_to(after), "main-job")] if held_to(after) else ()),
        (
            f"All six, caps of {together['sum_of_caps'] / GIB:.2f} GiB in a limit of 40 GiB",
            samples(together["nvml"]) + (f"; in five minutes there {at_the_caps(loop)}" if loop else ""),
            "all-frameworks",
        ),
    ]
    if measured("h200-moment.json"):
        told = load("h200-moment.json")
        programs, quiet = list(told["programs"].values()), list(told["quiet"].values())
        right = sum(1 for one in programs if all(ok for ok, _ in one["fields"].values()))
        tried = [one["followed"]["helped"] for one in programs if one["followed"]["tried"]]
        rows.append(
            (
                "Reports on ordinary programs that run out of memory",
                f"{right} of {len(programs)} all right, the advice helped in {sum(tried)} of {len(tried)}; "
                f"{sum(len(one['alarms']) for one in quiet)} alarms in {len(quiet)} programs that are in order",
                "moment",
            )
        )
    if measured("h200-elastic.json"):
        rows.append((*_elastic_table.row(load("h200-elastic.json")["scenarios"]), "elastic"))
    if measured("h200-suspend.json"):
        rows.append((*_suspend_table.row(load("h200-suspend.json")["scenarios"]), "suspend"))
    rows += [
        (
            "A leak of 1 GiB/s, 20 GiB below the cap",
            f"announced {watched['scenarios']['leak']['announced_before_oom_s']} s before the error",
            "watch",
        ),
        (
            "Small PyTorch operations with the monitor at 10 Hz",
            f"{ops['median']:.4f} times as long (95 %: {ops['low']:.4f}–{ops['high']:.4f})",
            "watch",
        ),
        (
            f"{speed['bytes'] / GIB:.0f} GiB to another framework, {len(speed['speed'])} pairs",
            f"at most {slowest:.0f} µs; through the host {host[0]:,.0f} to {host[-1]:,.0f} ms",
            "exchange",
        ),
        ("`memguard.init`, no framework imported (aim: 50 ms)", f"{begun:.0f} ms", source),
    ]
    lines = []
    for what, found, name in rows:
        old = " STALE" if stale(load(f"h200-{name}.json")) else ""
        lines.append(f"| {what} | {found} | [{name}](benchmarks/results/h200-{name}.json){old} |")
    tests = [(path.name, load(path.name)) for path in sorted(RESULTS.glob("*gpu-tests.json"))]
    found = "; ".join(outcomes(result) for _, result in tests)
    old = " STALE" if any(stale(result) for _, result in tests) else ""
    links = ", ".join(f"[{name.removesuffix('.json')}](benchmarks/results/{name})" for name, _ in tests)
    lines.append(f"| The tests in `tests/gpu` | {found} | {links}{old} |")
    everything, about = [load(path.name) for path in RESULTS.glob("*.json")], job["about"]
    failed = sum(1 for result in everything for ok, _ in result.get("checks", {}).values() if not ok)
    lacks = sum(len(lacking(result)) for result in everything) + sum(map(len, absent().values()))
    without = f", and the {lacks} of today's list that were not measured" if lacks else ""
    return "\n".join(
        [
            "| | measured | result |",
            "| --- | --- | --- |",
            *lines,
            "",
            f"On {about_gpu(job)}. TensorFlow {about['versions']['tensorflow']}, {about['tensorflow_build']}."
            f"{_exchange_tables.about_numba(about)}",
            *([STALE] if any(stale(result) for result in everything) else []),
            f"[docs/results.md](docs/results.md) has all figures, and the {failed} checks that were missed{without}.",
        ]
    )


PLACES = {
    "README.md": (("ledger", readme_ledger), ("results", readme_table)),
    "docs/results.md": (("results", results),),
    "docs/exchange.md": (("exchange", exchange_document),),
    "docs/ledger.md": (("overheads", _figures.overheads),),
}
"""What is generated: for each file the names of its markers, and what makes the text between them."""


def generated(document: str, text: str) -> str:
    """The text of a document with its generated parts made anew, and its figures."""
    for name, make in PLACES.get(document, ()):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return _figures.filled(text)


def status() -> list[str]:
    """One line for each result: measured when, on what, and whether memguard has changed since."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        result = load(path.name)
        about, state = result["about"], STALE if stale(result) else "current"
        lacks = f" It lacks {checks_of(lacking(result))}." if lacking(result) else ""
        lines.append(f"{path.name}: {about['gpu'] or 'no GPU'}, {about['date'][:10]}: {state}{lacks}")
    return lines + [f"{name}: NOT MEASURED." for name in absent()]


def wrong(release: bool) -> list[str]:
    """What must not stay as it is, as sentences.

    A document that does not say what the results say: a figure of other code would be shown as current. For a release
    also each result that is stale or lacks checks.
    """
    found = [
        f"{document} does not say what the results say: run python benchmarks/table.py"
        for document in _figures.documents()
        if generated(document, text := (ROOT / document).read_text(encoding="utf-8")) != text
    ]
    if release:
        results = [(path.name, load(path.name)) for path in sorted(RESULTS.glob("*.json"))]
        found += [f"{name} is stale: measure it again" for name, result in results if stale(result)]
        found += [f"{name} lacks {checks_of(lacking(result))}" for name, result in results if lacking(result)]
        found += [f"{name} is not there: measure it" for name in absent()]
    return found


def main() -> int:
    if {"--status", "--release"} & set(sys.argv):
        print("\n".join(status()))
        old = sum(1 for path in RESULTS.glob("*.json") if stale(load(path.name)))
        if old:
            print(f"\nSTALE: {old} of {len(list(RESULTS.glob('*.json')))} results are of other code than this one.")
        problems = wrong("--release" in sys.argv)
        print("\n".join(f"FAIL  {problem}" for problem in problems))
        return 1 if problems else 0
    for document in _figures.documents():
        path = ROOT / document
        path.write_text(generated(document, path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
