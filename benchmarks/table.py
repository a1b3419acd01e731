"""The tables of README.md and docs/exchange.md, made from the committed results, and which of those are stale.

python benchmarks/table.py            # print README's
python benchmarks/table.py --write    # put them into README.md and docs/exchange.md
python benchmarks/table.py --status   # which results are stale
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _exchange_tables
from _run import ROOT, source_hash

RESULTS = ROOT / "benchmarks" / "results"
LABELS = {**_exchange_tables.PLAIN, "tensorflow": "TensorFlow ¹"}
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
EXCHANGE_BEGIN, EXCHANGE_END = "<!-- exchange: begin -->", "<!-- exchange: end -->"
MIB, GIB = 1 << 20, 1 << 30


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def short(exception: str | None) -> str:
    return "nothing" if exception is None else exception.removeprefix("builtins.").split(".")[-1]


def main_job() -> list[str]:
    result = load("h200-main-job.json")
    about, scenarios = result["about"], result["scenarios"]
    before, after = scenarios["without_memguard"], scenarios["together"]
    versions, nvml = about["versions"], after["nvml"]
    pair = scenarios["torch_and_pycuda"]["readings"]
    passed = sum(1 for ok, _ in result["checks"].values() if ok)
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
    samples = f"at most {nvml['max_bytes'] / GIB:.2f} GiB in {nvml['samples']} samples, one each 50 ms"
    ledgers = f"{len(after['readings'] + pair)} ledgers, each summing to NVML's total to the byte"
    unaccounted = f"unaccounted {worst / MIB:+.0f} MiB at worst with PyTorch and PyCUDA live"
    signal, cured = -scenarios["order_control"]["returncode"], scenarios["order_cured"]["multiprocessors"]
    rows = [
        ("", "without memguard", "with memguard, each asked for more until it refused"),
        ("---", "---", "---"),
        ("TensorFlow ¹", f"takes {took:,.0f} MiB at its first operation", with_it("tensorflow")),
        ("PyTorch", without("torch"), with_it("torch")),
        ("PyCUDA", without("pycuda"), with_it("pycuda")),
        ("the process, by NVML", f"leaves {left:.1f} GiB of the card", samples),
        ("says who holds it", "nobody", f"{ledgers}; {unaccounted}"),
        (
            "`import tensorflow` before `import torch`",
            f"first matrix product dies of signal {signal}",
            f"works, {cured} multiprocessors seen",
        ),
    ]
    return [
        f"One process on an {about['gpu']}, limit 40 GiB. Without: TensorFlow first, then 4 GiB for each other.",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"¹ TensorFlow {versions['tensorflow']}, {about['tensorflow_build']}. PyTorch {versions['torch']}, "
        f"PyCUDA {versions['pycuda']}, driver {about['driver']}.",
        f"{passed} of {len(result['checks'])} checks passed, {about['date'][:10]}: `{about['command']}`, "
        f"[h200-main-job.json](benchmarks/results/h200-main-job.json), of memguard {about['memguard_hash']}.",
        *missed(result),
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
        "| what it costs before any work | median (5 %–95 %) |",
        "| --- | --- |",
        f"| `import memguard`, as a ratio to `import pydantic, yaml` | {spread(ratio)}; "
        f"the control against itself {spread(control)} |",
        f"| `memguard.init`, no framework imported, its dependencies loaded | {ms(alone)} |",
        f"| the same in a fresh interpreter, imports of pydantic, PyYAML, nvidia-ml-py included | {ms(everything)} |",
        f"| a plan of 6 frameworks × 8 GPUs | {ms(plan)} |",
        *missed(result),
    ]


def gpu_tests() -> list[str]:
    lines = []
    for path in sorted(RESULTS.glob("*gpu-tests.json")):
        result = json.loads(path.read_text())
        outcomes = list(result["results"].values())
        passed, failed = outcomes.count("passed"), outcomes.count("failed")
        gpus = f"{result['about']['gpus']} × {result['about']['gpu']}"
        lines.append(
            f"`tests/gpu` on {gpus}: {passed} passed, {failed} failed ([{path.name}](benchmarks/results/{path.name}))."
        )
    return lines


def all_frameworks() -> list[str]:
    result = load("h200-all-frameworks.json")
    about, scenarios = result["about"], result["scenarios"]
    six, loop, hour = scenarios["together"], scenarios["loop"], scenarios["simulated_hour"]
    versions = about["versions"]
    passed = sum(1 for ok, _ in result["checks"].values() if ok)
    pairs = result["checks"]["30 import orders alive and capped"][1]
    rows = []
    for name, label in LABELS.items():
        one = six["driven"][name]
        most, cap, refusals = one["most_held"] / MIB, one["cap"] / MIB, one["refusals"]
        rows.append(
            f"| {label} | {most:,.0f} of {cap:,.0f} MiB | `{short(refusals[0]['exception'])}`, {len(refusals)} times | "
            f"{loop['refused'][name]} |"
        )
    worst = max(six["readings"], key=lambda r: abs(r["unaccounted"]))
    ddp = load("h200-x2-ddp.json")
    took = [max(r["overhead"] for r in one["readings"]) / MIB for one in ddp["ranks"]]
    kept = ddp["ranks"][0]["reserve"] / MIB
    most = {name: s["nvml"]["max_bytes"] / GIB for name, s in (("six", six), ("loop", loop))}
    return [
        f"All six in one process, limit 40 GiB (caps {six['sum_of_caps'] / GIB:.2f} GiB together), each emptied and",
        "driven to its refusal while the other five are full:",
        "",
        "| | most held | refuses with | refusals in five minutes at the caps |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        f"- The process, by NVML every 50 ms: at most {most['six']:.2f} GiB in {six['nvml']['samples']} samples, and "
        f"{most['loop']:.2f} GiB in {loop['nvml']['samples']} of the five minutes.",
        f"- {len(six['readings'])} ledgers sum to NVML's total to the byte; unaccounted "
        f"{worst['unaccounted'] / MIB:+.0f} MiB at worst (TensorFlow's unseen pool in it). In five minutes "
        f"({loop['allocated']:,} allocations, {loop['readings']} ledgers, TensorFlow without growth) it drifts by "
        f"{loop['unaccounted_drift'] / MIB:.0f} MiB; in a simulated hour by {hour['unaccounted_drift'] / MIB:.0f} MiB.",
        f"- Import orders of two, alive and capped: {pairs}.",
        f"- PyTorch DDP on two GPUs (NCCL): {took[0]:,.0f} and {took[1]:,.0f} MiB outside torch's cap at most, in a "
        f"reserve of {kept:,.0f} MiB ([h200-x2-ddp.json](benchmarks/results/h200-x2-ddp.json)).",
        "",
        f"JAX {versions['jax']}, CuPy {versions['cupy-cuda13x']}, Numba-CUDA {versions['numba-cuda']}. "
        f"{passed} of {len(result['checks'])} checks passed, {about['date'][:10]}: `{about['command']}`, "
        "[h200-all-frameworks.json](benchmarks/results/h200-all-frameworks.json), "
        f"of memguard {about['memguard_hash']}.",
        *missed(result, ddp),
    ]


def watch() -> list[str]:
    if not (RESULTS / "h200-watch.json").exists():
        return []
    result = load("h200-watch.json")
    about, scenarios = result["about"], result["scenarios"]
    passed = sum(1 for ok, _ in result["checks"].values() if ok)
    reports = {name: one for name, one in scenarios.items() if one.get("report")}
    shown = scenarios["cupy, card full"]
    leak, saw, tick, ops = (scenarios[name] for name in ("leak", "sawtooth", "tick", "small ops"))
    ratio, control = ops["ratio"], ops["control"]
    replay = load("replay.json")["runs"][-1]
    start = load("startup.json")["start"]
    armed = start["with"]["median_ms"] - start["without"]["median_ms"]
    return [
        "An out-of-memory error as memguard explains it (CuPy asks, PyTorch and another process hold the card):",
        "",
        "```",
        *shown["printed"].splitlines(),
        "```",
        "",
        "| watching | measured |",
        "| --- | --- |",
        f"| out-of-memory errors driven for real, by the own cap and by a sibling on a full card | "
        f"{len(reports)}, each with its report |",
        f"| a leak of 1 GiB a second from 20 GiB below the cap | announced {leak['announced_before_oom_s']} s before "
        "the error |",
        f"| a sawtooth workload, up to {max(saw['most'].values()):.0%} of its cap, at 10 Hz | {len(saw['alarms'])} "
        f"alarms in {saw['seconds_run'] / 60:.0f} minutes |",
        f"| one tick with all six live | {tick['tick_us']['median']:.0f} µs median (90 %: "
        f"{tick['tick_us']['p90']:.0f}); the probes alone {sum(tick['probes_us'].values()):.0f} |",
        f"| small PyTorch operations with the monitor at 10 Hz, as a ratio to without | {ratio['median']:.4f} (95 %: "
        f"{ratio['low']:.4f}–{ratio['high']:.4f}); without against without {control['median']:.4f} "
        f"({control['low']:.4f}–{control['high']:.4f}), {ops['pairs']} pairs |",
        f"| replay of a timeline of {replay['samples']:,} samples, no GPU | {replay['seconds']:.0f} s, "
        f"{replay['peak_rss_kib'] / 1024:.0f} MiB |",
        f"| start of a Python that has memguard in its environment, without MEMGUARD_CONFIG | {armed:+.2f} ms |",
        "",
        f"{passed} of {len(result['checks'])} checks passed, {about['date'][:10]}: `{about['command']}`, "
        f"[h200-watch.json](benchmarks/results/h200-watch.json), of memguard {about['memguard_hash']}.",
        *missed(result),
        "",
    ]


def doctor() -> list[str]:
    result = load("h200-doctor.json")
    about, scenarios = result["about"], result["scenarios"]
    passed = sum(1 for ok, _ in result["checks"].values() if ok)

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
        "`memguard doctor` on the same GPU:",
        "",
        "| what was done | found, above info |",
        "| --- | --- |",
        *(f"| {what} | {found(name)} |" for what, name in rows),
        f"| six frameworks, each in a process of its own, and two processes of several | {times['median']:.1f} s "
        f"(median of {len(times['runs'])}; at most {max(times['runs']):.1f} s) |",
        "",
        f"{passed} of {len(result['checks'])} checks passed, {about['date'][:10]}: `{about['command']}`, "
        f"[h200-doctor.json](benchmarks/results/h200-doctor.json), of memguard {about['memguard_hash']}.",
        *missed(result),
        "",
    ]


def exchange() -> list[str]:
    """README's part of the exchange; nothing where it was not measured yet."""
    if not (RESULTS / "h200-exchange.json").exists():
        return []
    result = load("h200-exchange.json")
    two = load("h200-x2-exchange.json") if (RESULTS / "h200-x2-exchange.json").exists() else None
    return [*_exchange_tables.in_short(result, two), *missed(result, *([two] if two else [])), ""]


def exchange_document() -> str:
    """What stands between the marks of docs/exchange.md; nothing where it was not measured yet."""
    if not (RESULTS / "h200-exchange.json").exists():
        return ""
    return "\n".join(_exchange_tables.whole(load("h200-exchange.json")))


def missed(*results: dict[str, Any]) -> list[str]:
    """The checks that did not pass, each with its figure."""
    failed = [f"{name}: {what}" for result in results for name, (ok, what) in result["checks"].items() if not ok]
    return ["", "**Missed:**", "", *(f"- {line}" for line in failed)] if failed else []


def ledger() -> list[str]:
    text = load("h200-main-job.json")["mixed_workload"]["ledger"]
    lines = [line.rstrip() for line in text.split("\nnote:")[0].splitlines()]
    return [
        "The ledger after [examples/mixed_workload.py](examples/mixed_workload.py) (TensorFlow prepares images,",
        "PyTorch trains, CuPy, JAX and Numba work on the scores, a PyCUDA kernel smooths them):",
        "",
        "```",
        *lines,
        "```",
    ]


def tables() -> str:
    parts = (main_job(), [""], all_frameworks(), [""], watch(), exchange(), doctor(), gpu_tests(), [""], ledger(), [""])
    return "\n".join([line for part in parts for line in part] + light())


def status() -> list[str]:
    """One line for each result: measured when, on what, and whether memguard has changed since (`source_hash`)."""
    current = {source_hash(), source_hash(whole=True)}
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        about = json.loads(path.read_text())["about"]
        fresh = about["memguard_hash"] in current
        state = "current" if fresh else "STALE: memguard/ has changed since"
        lines.append(f"{path.name}: {about['gpu'] or 'no GPU'}, {about['date'][:10]}: {state}")
    return lines


def _put(path: Path, begin: str, shown: str, end: str) -> None:
    text = path.read_text()
    head, tail = text.split(begin)[0], text.split(end)[1]
    path.write_text(f"{head}{begin}\n{shown}\n{end}{tail}")


def main() -> int:
    if "--status" in sys.argv:
        print("\n".join(status()))
        return 0
    if "--write" in sys.argv:
        _put(ROOT / "README.md", BEGIN, tables(), END)
        _put(ROOT / "docs" / "exchange.md", EXCHANGE_BEGIN, exchange_document(), EXCHANGE_END)
        return 0
    print(tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
