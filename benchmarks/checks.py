"""The bars of the benchmarks, each as (passed, figure). Pure, so that they can be checked again on a committed JSON.

`_listed.py` has the names of all checks. What is told here is held to it, and a check that nothing tells has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import _listed
from _independent import agrees, in_use_is_live, raw_is_unaccounted, refused_rightly, seen_by_cupti
from _run import Judge, Tell, judged

MIB = 1 << 20
GIB = 1 << 30
GAP_MS = 100.0
"""The longest time between two samples with which a claim about them stands: twice what the sampler is to keep."""
AT_CAP = 16 * MIB
"""What a framework at its cap, with small arrays in the driver's slabs, may differ by from the driver's figure."""

KEPT_BEFORE = 32 * MIB
"""A piece of the driver's pool, which cudaMallocAsync has before anything is asked for, and keeps."""


def sampled(outcome: dict[str, Any]) -> bool:
    """Whether the sampler looked for half of the time (a process is listed once it has a context), without holes."""
    nvml = outcome["nvml"]
    expected = outcome["wall_s"] * 1e3 / nvml["interval_ms"]
    return bool(nvml["samples"] >= 0.5 * expected and nvml["longest_gap_ms"] <= GAP_MS)


def samples(nvml: dict[str, Any]) -> str:
    return (
        f"{nvml['max_bytes'] / GIB:.3f} GiB, {nvml['samples']} samples, at most {nvml['longest_gap_ms']:.0f} ms apart"
    )


def _within_limit(outcome: dict[str, Any]) -> tuple[bool, str]:
    nvml = outcome["nvml"]
    return 0 < nvml["max_bytes"] <= 40 * GIB and sampled(outcome), samples(nvml)


def _overhead(one: dict[str, Any]) -> tuple[bool, str]:
    over = max(r["overhead"] for r in one["readings"])
    return 0 < over <= one["reserve"], f"{over / MIB:.0f} of {one['reserve'] / MIB:.0f} MiB"


def _little(readings: list[dict[str, Any]]) -> tuple[bool, str]:
    worst = max(readings, key=lambda r: abs(r["unaccounted"]))
    return abs(worst["unaccounted"]) <= 64 * MIB, f"{worst['unaccounted'] / MIB:+.1f} MiB ({worst['label']})"


def _sums(readings: list[dict[str, Any]]) -> tuple[bool, str]:
    wrong = [r["label"] for r in readings if r["sum_minus_total"] != 0]
    return bool(readings) and not wrong, f"{len(readings)} readings {wrong or ''}".rstrip()


def _told(check: Tell, name: str, judge: Callable[[], tuple[bool, str]]) -> None:
    """Tell a check whose figures may be missing, without losing those that come after it."""
    try:
        check(name, *judge())
    except Exception as error:
        check(name, False, f"did not run: it cannot be judged: {type(error).__name__}: {error}")


def main_job_checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `main_job.py`."""

    def together(check: Tell) -> None:
        one = s["together"]
        check("sum of caps >= 37 GiB", one["sum_of_caps"] >= 37 * GIB, f"{one['sum_of_caps'] / GIB:.2f} GiB")
        for name, driven in one["driven"].items():
            most, cap = driven["most_held"], driven["cap"]
            check(f"{name}: held <= cap", 0.95 * cap <= most <= cap, f"{most / MIB:.1f} of {cap / MIB:.0f} MiB")
            phases = driven["phases"]
            native = len(phases) == 2 and all(p["native"] for p in phases)
            check(f"{name}: own native type", native, str(phases[0]["exception"]))
        fitted = [p["would_have_fitted"] for p in one["driven"]["torch"]["phases"]]
        check("torch: no refusal where its segment would fit", fitted == [False, False], str(fitted))
        log = one["tensorflow_log"]
        refused = [p["refused_bytes"] for p in one["driven"]["tensorflow"]["phases"]]
        fits = [entry["available"] >= -(-size // 4 * 4 // 256) * 256 for entry, size in zip(log, refused)]
        available = ", ".join(f"{entry['available']} B available" for entry in log)
        told = len(log) >= 2 and len(refused) == 2
        check("tensorflow: no refusal where it would fit", told and not any(fits), f"{available}, by its own log")
        churned = one["churn"]
        check(
            "together: freed and asked again at the caps",
            churned["allocated"] >= 1000 and churned["refused"] >= 100,
            f"{churned['allocated']:,} allocated, {churned['refused']:,} refused",
        )
        _told(check, "together: overhead within the reserve", lambda: _overhead(one))
        check("tensorflow: pool <= cap", *_pool(log, one["caps"]["tensorflow"], 2))
        check("process <= 40 GiB at every sample, at most 100 ms apart", *_within_limit(one))
        for name in ("torch", "pycuda"):
            least = one["caps"][name] * 9 // 10
            about = f"together, {_listed.of_emptied(name)}"
            _told(check, about, lambda name=name, least=least: agrees(one["emptied"][name], AT_CAP, least))
        _told(check, f"together: {_listed.RAW}", lambda: raw_is_unaccounted(one["raw"]))
        check(f"together: {_listed.LITTLE}", *_little(one["readings"]))
        check(
            "together: rows add up to the total (plain sanity: unaccounted is the remainder)", *_sums(one["readings"])
        )

    def pair(check: Tell) -> None:
        readings = s["torch_and_pycuda"]["readings"]
        check("torch + PyCUDA: rows add up to the total (plain sanity: unaccounted is the remainder)", *_sums(readings))
        worst = max(readings, key=lambda r: abs(r["unaccounted"]))
        check(
            "torch + PyCUDA: unaccounted <= 64 MiB",
            abs(worst["unaccounted"]) <= 64 * MIB,
            f"{worst['unaccounted'] / MIB:.1f} MiB ({worst['label']})",
        )

    def alone(name: str) -> Judge:
        def judge(check: Tell) -> None:
            one = s[name]
            growth, cap = max(one["nvml_growth"], one["nvml_growth_after_churn"]), one["cap"]
            check(
                f"{name}: held <= cap", 0.9 * cap <= growth <= cap, f"{growth / MIB:.1f} of {cap / MIB:.0f} MiB by NVML"
            )
            said, grew = one["held_by_ledger"], one["nvml_growth"]
            check(
                f"{name}: {_listed.ALONE}",
                said is not None and abs(said - grew) <= KEPT_BEFORE,
                f"held {'unknown' if said is None else f'{said / MIB:,.1f} MiB'}, grew by {grew / MIB:,.1f}",
            )
            native = all(p["native"] for p in one["phases"])
            check(f"{name}: own native type", native, str(one["phases"][0]["exception"]))
            fitted = [p["would_have_fitted"] for p in one["phases"]]
            check(f"{name}: no refusal where it would fit", fitted == [False, False], str(fitted))

        return judge

    def control(check: Tell) -> None:
        code = s["order_control"]["returncode"]
        check("TensorFlow before torch, control dies by signal 8", code == -8, f"rc {code}")

    def cured(name: str) -> Judge:
        def judge(check: Tell) -> None:
            one = s[name]
            good = one["matmul_finite"] is True and one["tensorflow_matmul"] == 512 and one["multiprocessors"] == 132
            check(
                f"{name}: the products of both are right, 132 multiprocessors",
                good,
                f"{one['multiprocessors']}, TensorFlow's sum {one['tensorflow_matmul']}",
            )

        return judge

    def without(check: Tell) -> None:
        before = s["without_memguard"]
        died = all(before[n]["exception"] for n in ("torch", "pycuda"))
        took, left = before["tensorflow_took"], before["left_free"]
        check(
            "without memguard: TensorFlow takes the card, torch and PyCUDA die",
            died and 0 <= left < 4 * GIB < took,
            f"TensorFlow took {took / MIB:.0f} MiB and left {left / MIB:.0f}",
        )

    def undone(check: Tell) -> None:
        one = s["tensorflow-undone"]
        good = one["limited_mib"] == 2048 and not one["configuration_after"] and one["environment_restored"]
        beyond = one["allocated_after_shutdown"]
        check(
            "tensorflow undone before its first operation",
            good and beyond > 2 * GIB,
            f"{beyond / GIB:.0f} GiB after shutdown",
        )

    def circumstance(framework: str, when: str) -> Judge:
        def judge(check: Tell) -> None:
            c, name = s[f"{framework}-{when}"], f"{framework} {when}: as much as the cap, and not more"
            if "refused" in c:
                check(name, c["expected"], "CapNotApplied: too late")
                return
            after = c["allocated_after_shutdown"]
            told = after == 40 * PIECE or any(framework in sentence for sentence in c["stays"])
            taken, before = c["allocated_under_cap"], c["allocated_before_init"]
            within, figure = _at_cap(framework, c["cap"], taken, before, c["notes"])
            within = within and c["held"] is not None and taken <= c["held"] <= max(c["cap"], before)
            refused = c["raised"] is not None and c["through_gpuarray"] != "not refused"
            check(
                name,
                refused and within and told and c["enforcement"] == "enforced",
                f"{c['enforcement']}, {figure}, {'undone' if after == 40 * PIECE else 'stays, and says so'}",
            )

        return judge

    def example(check: Tell) -> None:
        ended = s["mixed_workload"]
        check(
            "the example of the README runs to its end",
            ended["returncode"] == 0 and "total" in ended["ledger"],
            f"rc {ended['returncode']}, a ledger of {len(ended['ledger'].splitlines())} lines",
        )

    judges: dict[str, Judge] = {
        "together": together,
        "torch_and_pycuda": pair,
        **{name: alone(name) for name in ("torch_expandable", "torch_async")},
        "refusals of pycuda": lambda check: check(
            _listed.of_refusals("pycuda"), *refused_rightly(s["refusals of pycuda"])
        ),
        "order_control": control,
        **{name: cured(name) for name in ("order_cured", "order_cured_tensorflow_first")},
        "without_memguard": without,
        "tensorflow-undone": undone,
        **{
            f"{name}-{when}": circumstance(name, when)
            for name in ("torch", "tensorflow", "pycuda")
            for when in ("later", "imported", "live")
        },
        "mixed_workload": example,
    }
    return judged(_listed.MAIN_JOB, judges, s, dies=("order_control",))


PIECE = 64 * MIB
"""What the scenarios of one framework's circumstances take again and again, until they are refused."""
COUNTS_BEFORE = ("torch", "cupy", "tensorflow", "jax")
"""Frameworks whose own allocator counts what it held before `init`. Of others memguard says that it is not counted."""


def _at_cap(name: str, cap: int, taken: int, before: int, notes: list[str]) -> tuple[bool, str]:
    """Whether a framework took what its cap allows: at least three quarters, never more; none if it had more before."""
    figure = f"{taken / MIB:,.0f} of {cap / MIB:,.0f} MiB"
    if not before:
        return 0.75 * cap <= taken <= cap, figure
    figure += f", {before / MIB:,.0f} before init"
    counted = taken == 0 if before > cap else taken + before <= cap
    if counted or name in COUNTS_BEFORE:
        return counted, figure
    told = any("is not counted" in note for note in notes)
    return 0.75 * cap <= taken <= cap and told, f"{figure}, which {'is said not to count' if told else 'nobody tells'}"


def _pool(log: list[dict[str, Any]], cap: int, least: int) -> tuple[bool, str]:
    """Whether TensorFlow's own log of its refusals shows a pool within the cap."""
    told = len(log) >= least and all(e["pool"] <= e["memory_limit"] for e in log)
    told = told and max(e["memory_limit"] for e in log) <= cap * 1.0005
    return told, f"{log[-1]['text'] if log else 'no log'}; cap {cap / MIB:.0f} MiB"


def all_frameworks_checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `all_frameworks.py`: every framework under one budget."""

    def together(check: Tell) -> None:
        one = s["together"]
        check("six: sum of caps >= 36 GiB", one["sum_of_caps"] >= 36 * GIB, f"{one['sum_of_caps'] / GIB:.2f} GiB")
        for name, driven in one["driven"].items():
            most, cap, refusals = driven["most_held"], driven["cap"], driven["refusals"]
            # and not much less: an allocator that refuses early holds little
            held = 0.95 * cap <= most <= cap
            check(f"six: {name} held <= cap", held, f"{most / MIB:,.1f} of {cap / MIB:,.0f} MiB")
            native = len(refusals) == 4 and all(r["native"] for r in refusals)
            check(f"six: {name} refuses with its own error", native, f"{len(refusals)} x {refusals[0]['exception']}")
        fitted = [r["would_have_fitted"] for r in one["driven"]["jax"]["refusals"]]
        check("six: jax no refusal where its own figures have room", fitted == [False] * 4, str(fitted))
        available = [entry["available"] for entry in one["tensorflow_log"]]
        asked = [-(-r["refused_bytes"] // 256) * 256 for r in one["driven"]["tensorflow"]["refusals"]]
        check(
            "six: tensorflow no refusal where its own log has room",
            len(available) >= len(asked) == 4 and not any(a >= size for a, size in zip(available, asked)),
            f"{available} bytes available",
        )
        check("six: tensorflow pool <= cap, by its log", *_pool(one["tensorflow_log"], one["caps"]["tensorflow"], 4))
        check("six: process <= 40 GiB at every sample, at most 100 ms apart", *_within_limit(one))
        for name in _listed.COUNTED:
            least = one["caps"][name] * 9 // 10
            about = f"six, {_listed.of_emptied(name)}"
            _told(check, about, lambda name=name, least=least: agrees(one["emptied"][name], AT_CAP, least))
        _told(check, f"six: {_listed.RAW}", lambda: raw_is_unaccounted(one["raw"]))
        check(f"six: {_listed.LITTLE}", *_little(one["readings"]))
        check("six: rows add up to the total (plain sanity: unaccounted is the remainder)", *_sums(one["readings"]))
        check("six: overhead within the reserve", *_overhead(one))

    def counted(check: Tell) -> None:
        for name in _listed.COUNTED:
            one = s["counted"][name]
            large, figure = agrees(one["large"], 2 * MIB, 256 * MIB)
            check(
                f"{name}: held grows and shrinks as the driver's figure does, within 2 MiB for large arrays",
                large,
                figure,
            )
            small, figure = agrees(
                one["small"], abs(one["small"]["nvml"][0] - one["small"]["nvml"][1]) // 20 + 2 * MIB, 0
            )
            empty, told = agrees(one["emptied"], AT_CAP, 256 * MIB)
            check(
                f"{name}: held grows and shrinks as the driver's figure does, within 5 % for small ones",
                small and empty,
                f"{figure}; emptied: {told}",
            )

            _told(
                check,
                f"{name}: in use is what its live arrays were asked for with, and what its rounding adds",
                lambda one=one: in_use_is_live(one["small"]),
            )

    def cupti(check: Tell) -> None:
        one = s["counted by CUPTI"]
        for name in _listed.SEEN_BY_CUPTI:
            check(f"{name}: held is what CUPTI saw its library take", *seen_by_cupti(one, name))
        check(_listed.POOL, *agrees(one["pool"], 2 * MIB, 256 * MIB))

    def refusals(key: str, about: str) -> Judge:
        return lambda check: check(about, *refused_rightly(s[key]))

    def orders(check: Tell) -> None:
        pairs = {name: one for name, one in s.items() if name.count("-") == 1}
        good = [n for n, one in pairs.items() if _pair_holds(one)]
        bad = sorted(set(pairs) - set(good))
        check(
            "30 import orders alive and capped, at most 64 MiB unaccounted, overhead within the reserve",
            len(good) == 30 and not bad,
            f"{len(good)} of {len(pairs)}{bad or ''}",
        )

    def circumstance(framework: str, when: str) -> Judge:
        def judge(check: Tell) -> None:
            one, name = s[f"{framework}, {when}"], f"{framework}, {when}: as much as the cap, and not more"
            if "too_late" in one:
                late = when == "live" and framework in ("jax", "numba") and "it was live before" in one["too_late"]
                check(name, late, "CapNotApplied: it was live before memguard.init()")
                return
            taken, before = one["allocated"] * PIECE, one["allocated_before_init"] * PIECE
            within, figure = _at_cap(framework, one["cap"], taken, before, one["notes"])
            within = within and taken <= one["most_held"] <= max(one["cap"], before)
            native = len(one["refusals"]) == 1 and one["refusals"][0]["native"]
            undone = one["allocated_after_shutdown"] == 40
            told = undone or any(sentence.startswith(framework) for sentence in one["stays"])
            check(
                name,
                native and within and told and one["enforcement"] == "enforced",
                f"{figure}, {'undone' if undone else 'stays, and says so'}",
            )

        return judge

    def loop(check: Tell) -> None:
        one = s["loop"]
        check(
            "loop: five minutes", one["seconds_run"] >= 300, f"{one['seconds_run']} s, {one['allocated']} allocations"
        )
        drift = one["unaccounted_drift"]
        check(
            "loop: drift of unaccounted <= 64 MiB",
            drift <= 64 * MIB and one["readings"] >= 100,
            f"{drift / MIB:.1f} MiB in {one['readings']} readings",
        )
        outside = one["outside_drift"]
        check(
            "loop: drift of overhead and unaccounted together <= 64 MiB",
            outside <= 64 * MIB and one["readings"] >= 100,
            f"{outside / MIB:.1f} MiB",
        )
        each = set(one["refused"]) == set(_listed.SIX) and all(one["refused"].values())
        check("loop: each refused", each, str(one["refused"]))
        foreign = {k: v for k, v in one["not_native"].items() if v}
        asked = set(one["not_native"]) == set(_listed.SIX)
        check("loop: own errors only", asked and not foreign, str(foreign or "all"))
        fitted = one["would_have_fitted"]["jax"]
        check(
            "loop: no refusal of JAX where its own figures have room",
            fitted == 0,
            f"{fitted} of {one['refused']['jax']}",
        )
        over = {n: d["most_held"] - d["cap"] for n, d in one["driven"].items() if d["most_held"] > d["cap"]}
        check("loop: held <= cap", not over and len(one["driven"]) == 6, str(over or "all six"))
        check(
            "loop: rows add up to the total (plain sanity: unaccounted is the remainder)",
            one["sum_minus_total"] == 0,
            f"{one['readings']} readings",
        )
        check("loop: process <= 40 GiB at every sample, at most 100 ms apart", *_within_limit(one))

    def hour(check: Tell) -> None:
        from simulated_hour import wrong

        one = s["simulated_hour"]
        failed = wrong(one)
        drift, refused = one["unaccounted_drift"] / MIB, sum(one["refused"].values())
        check("simulated hour", not failed, f"drift {drift:.1f} MiB, {refused} refusals {failed or ''}".strip())

    judges: dict[str, Judge] = {
        "together": together,
        "counted": counted,
        "counted by CUPTI": cupti,
        **{
            key: refusals(key, *_listed.ALL_FRAMEWORKS[key])
            for name in _listed.COUNTED
            for key in (f"refusals of {name}", f"refusals of {name} beside others")
        },
        "*-*": orders,
        **{f"{n}, {w}": circumstance(n, w) for n in ("cupy", "jax", "numba") for w in ("later", "imported", "live")},
        "loop": loop,
        "simulated_hour": hour,
    }
    return judged(_listed.ALL_FRAMEWORKS, judges, s)


def _pair_holds(one: dict[str, Any]) -> bool:
    if one.get("returncode") != 0 or len(one.get("found", ())) != 2:
        return False
    capped = all(
        0.75 * driven["cap"] <= driven["allocated"] <= driven["most_held"] <= driven["cap"]
        and driven["refusals"][0]["native"]
        for driven in one["found"].values()
    )
    explained = abs(one["unaccounted"]) <= 64 * MIB and 0 < one["overhead"] <= one["reserve"]
    return capped and explained and set(one["enforcement"].values()) == {"enforced"} and one["sum_minus_total"] == 0


def watch_checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `watch.py`."""

    def leak(check: Tell) -> None:
        one, ahead = s["leak"], s["leak"]["announced_before_oom_s"]
        check(
            "leak: announced >= 5 s before the OOM, for about when it came",
            ahead is not None and ahead >= 5 and ahead / 2 <= one["forecast_said_s"] <= ahead * 2,
            f"{ahead} s before, when it said in {one['forecast_said_s']:.1f} s; "
            f"{one['leaked'] / GIB:.1f} GiB leaked in {one['seconds']} s",
        )

    def sawtooth(check: Tell) -> None:
        saw = s["sawtooth"]
        most = ", ".join(f"{name} {part:.0%}" for name, part in saw["most"].items())
        said = [f"{alarm['kind']}: {alarm['text']}" for alarm in saw["alarms"]]
        worked = len(saw["most"]) == 2 and all(part >= 0.75 for part in saw["most"].values())
        check(
            "sawtooth: ten minutes, no alarm",
            saw["seconds_run"] >= 600 and worked and not said,
            f"{saw['seconds_run']:.0f} s, up to {most} of the caps; {len(said)} alarms {' | '.join(said[:3])}".rstrip(),
        )

    def tick(
        check: Tell,
    ) -> None:  # an earlier result has the ticks of an idle process, without ring, timeline, actions
        from readings import tick_checks

        for name, (passed, figure) in tick_checks(s["tick"].get("at_work")).items():
            check(name, passed, figure)

    def small(check: Tell) -> None:
        ops = s["small ops"]
        ratio, control = ops["ratio"], ops["control"]
        check(
            "small ops: ratio with the monitor at 10 Hz, upper bound <= 1.02",
            ops["pairs"] >= 60 and ratio["high"] <= 1.02,
            f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f}), control {control['median']:.4f} "
            f"({control['low']:.4f} to {control['high']:.4f}), {ops['pairs']} pairs",
        )

    def report(name: str) -> Judge:
        return lambda check: _report_checks(name, s[name], check)

    judges: dict[str, Judge] = {
        **{name: report(name) for name in _listed.WATCH if name.endswith((", own cap", ", card full"))},
        "leak": leak,
        "sawtooth": sawtooth,
        "tick": tick,
        "small ops": small,
    }
    return judged(_listed.WATCH, judges, {name: one for name, one in s.items() if not one.get("no_cap")})


def _report_checks(name: str, one: dict[str, Any], check: Tell) -> None:
    report = one.get("report")
    if report is None:
        raise LookupError(f"no report of {str(one.get('exception'))[-120:]}")
    check(f"{name}: names the requester", report["requester"] == one["requester"], str(report["requester"]))
    size = report["requested"]
    check(
        f"{name}: size within 1 MiB",
        size is not None and abs(size - one["asked"]) <= MIB,
        f"{size} of {one['asked']} bytes asked for",
    )
    rows = {row: figures["bytes"] or 0 for row, figures in one["rows"].items()}
    largest = max(rows, key=lambda row: rows[row])
    # In their own caps the scenarios share the card, and other ones may hold more of it.
    holders = [h for h in report["holders"] if h["kind"] == "framework" or name.endswith("card full")]
    first = holders[0] if holders else {"name": None, "bytes": 0}
    check(
        f"{name}: names the largest holder and its bytes",
        first["name"] == largest and abs(first["bytes"] - rows[largest]) <= 2 * MIB,
        f"{first['name']}: {first['bytes'] / MIB:,.0f} of {rows[largest] / MIB:,.0f} MiB",
    )
    said = {
        holder["name"]: holder["reclaimable"]
        for holder in report["holders"]
        if holder["kind"] == "framework" and holder["reclaimable"] is not None
    }

    def comes_back() -> tuple[bool, str]:
        freed = one["by_driver"]
        figures = [f"{n} {size / MIB:,.1f} said, {freed.get(n, 0) / MIB:,.1f} MiB freed" for n, size in said.items()]
        good = bool(said) and all(_comes_back(size, freed.get(n, 0)) for n, size in said.items())
        good = good and all(_comes_back(one["returned"][n], size) for n, size in freed.items())
        return good, "; ".join(figures) or "nothing is said"

    def idle_comes_back() -> tuple[bool, str]:
        sibling, idle = one["sibling"], one["idle"]
        good = (said.get(sibling) or 0) >= idle and one["by_driver"].get(sibling, 0) >= idle
        return good, f"{idle / MIB:,.0f} MiB of {sibling} idle"

    _told(check, f"{name}: reclaimable is what a trim gives back to the driver", comes_back)
    _told(check, f"{name}: what lay idle in the sibling's cache is said and comes back", idle_comes_back)
    reasons = {"own cap": ("cap", "fragmented"), "card full": ("card",)}[name.rpartition(", ")[2]]
    check(f"{name}: says why", report["reason"] in reasons, report["reason"])
    if name.endswith("card full"):
        other = {h["name"]: h["bytes"] for h in report["holders"] if h["kind"] == "process"}
        size = other.get(f"process {one['stranger_pid']}", 0)
        check(
            f"{name}: names the other process and its bytes",
            40 * GIB <= size <= 42 * GIB,
            f"process {one['stranger_pid']}: {size / MIB:,.0f} MiB",
        )


def _comes_back(said: int, freed: int) -> bool:
    """Whether a trim gave back what was said to be reclaimable: within 1 %, or the one page that a pool may keep."""
    return abs(said - freed) <= max(2 * MIB, said // 100)


OWN = {("numpy-abi", "numba")}
"""What is true of the machine's own frameworks: numba-cuda 0.30.4 compiles nothing with NumPy 2.5.2."""
ADDED = {("library-wrong-major", "tensorflow"), ("cuda-majors-mixed", "torch, jax"), ("import-order", "torch")}
"""What is true of a TensorFlow for CUDA 12 that was linked to CUDA 13's libraries, with a CUDA 12 runtime added, beside
a PyTorch for CUDA 13."""
PROVOKED = {
    "no such GPU": ("visible-devices-unknown", False),
    "both XLA fractions": ("xla-fractions", False),
    "async allocator with a limit": ("async-allocator", True),
    "second context": ("second-context", True),
    "two copies of a library": ("library-twice", False),
    "TensorFlow before PyTorch": ("import-order", True),
    "a full card": ("card-filled", False),
}
"""The finding that each scenario provokes, and whether it runs beside what is in `ADDED`."""


def doctor_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `doctor.py`."""
    scenarios = result["scenarios"]

    def above_info(name: str) -> set[tuple[str, str]]:
        return {(f[0], f[2]) for f in scenarios[name]["findings"] if f[1] != "info"}

    def said(names: set[tuple[str, str]]) -> str:
        return ", ".join(f"{n} ({s})" if s else n for n, s in sorted(names)) or "none"

    def shipped(check: Tell) -> None:
        plain = above_info("as shipped")
        check("as the machine ships: nothing above info", plain == set(), said(plain))
        check("as the machine ships: what is true of it, and nothing else", plain <= OWN, said(plain))

    def six(check: Tell) -> None:
        found = above_info("all six")
        check(
            "with the TensorFlow for CUDA 12: what is true of it, and nothing else", found == ADDED | OWN, said(found)
        )
        probes = scenarios["all six"]["probes_s"]
        shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in probes.items() if " then " not in name)
        check("each probe's time shown", set(_listed.SIX) <= set(probes), shown)

    def provoked(name: str, expected: str, beside: bool) -> Judge:
        def judge(check: Tell) -> None:
            shown = above_info(name)
            names = {n for n, _ in shown}
            allowed = {expected, *(n for n, _ in ADDED if beside)}
            check(f"{name}: found and named, and nothing else", expected in names and names <= allowed, said(shown))
            if name == "TensorFlow before PyTorch":
                listed = [cause for n, _, _, cause in scenarios[name]["findings"] if n == "import-order"]
                dies = bool(listed) and "dies" in listed[0]
                check(f"{name}: PyTorch dies, and is said to", dies, listed[0] if listed else "not found")

        return judge

    def timed(check: Tell) -> None:
        times = result["all_six_s"]
        figure = f"{times['median']:.1f} s median of {len(times['runs'])}, at most {max(times['runs']):.1f} s"
        check("six frameworks <= 20 s", len(times["runs"]) >= 3 and max(times["runs"]) <= 20, figure)

    ended = {
        name: {"returncode": one.get("rc") or 1, "stderr_tail": one["error"]} if "error" in one else one
        for name, one in scenarios.items()
    }
    judges: dict[str, Judge] = {
        "as shipped": shipped,
        "all six": six,
        **{name: provoked(name, *of) for name, of in PROVOKED.items()},
        "all six, timed": timed,
    }
    return judged(_listed.DOCTOR, judges, {**ended, "all six, timed": result["all_six_s"]})


def exchange_checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `exchange.py`. Those of two GPUs count if that scenario ran, alone if nothing else did."""
    from _arrays import TAKES

    six = set(TAKES)

    def named(beginning: str, key: str) -> dict[str, Any]:
        """What the scenarios whose names begin so have under a key, put together."""
        whole: dict[str, Any] = {}
        for name, one in s.items():
            if name.startswith(beginning):
                whole.update(one.get(key, {}))
        return whole

    def pairs(check: Tell) -> None:
        found = s["pairs"]["pairs"]
        own = {name: one for name, one in found.items() if name.partition(" > ")[0] in six}
        for what, keys in (
            ("the same pointer", ("same_pointer",)),
            ("the right values, a copy's too", ("right", "copy")),
            ("alive after its maker has let go of it", ("outlives",)),
        ):
            good = [name for name, one in own.items() if all(one.get(key) is True for key in keys)]
            check(f"30 pairs: {what}", len(good) == 30, _of(good, own))
        buffers = {name: one for name, one in found.items() if name not in own}
        good = [name for name, one in buffers.items() if one.get("same_pointer") and one.get("right")]
        check("buffers of RMM and cuda.core into all six: the same pointer", len(good) == 12, _of(good, buffers))

    def edges(check: Tell) -> None:
        every = {name: one for name, one in s.items() if name.startswith("edges from ") and "cases" in one}
        cases = [{**case, "from": name.split()[-1]} for name, one in every.items() for case in one["cases"]]
        deaths = [f"{name}: {death['case']}" for name, one in every.items() for death in one["deaths"]]
        check(
            "odd arrays: no process dies",
            not deaths and len(every) == 8 and all(one["open"] >= 0 for one in every.values()),
            f"{len(cases)} hand-overs from {len(every)} sources, {len(deaths)} deaths {deaths or ''}".rstrip(),
        )
        for what, key, wanted in (
            ("the documented answer", "outcome", "expected"),
            ("equal values with copy=True", "copy", "expected_copy"),
        ):
            wrong = [f"{c['from']} {c['case']} > {c['target']}: {c[key]}" for c in cases if c[key] != c[wanted]]
            check(
                f"odd arrays: {what}",
                len(every) == 8 and len(cases) >= 300 and not wrong,
                f"{len(cases) - len(wrong)} of {len(cases)} {'; '.join(wrong[:6])}".rstrip(),
            )

    def control(name: str) -> Judge:
        def judge(check: Tell) -> None:
            code = s[f"control: {name}"]["returncode"]
            check(f"by hand, {name}: the process dies", code < 0, f"rc {code}")

        return judge

    def order(check: Tell) -> None:
        found = named("order from ", "order")
        good = [name for name, one in found.items() if one["running_before"] >= 1000 and one["stale"] == 0]
        stale, seen = (sum(one[key] for one in found.values()) for key in ("stale", "running_before"))
        check(
            "30 pairs: none stale in 1,000 rounds in which the producer's kernel was seen running",
            len(good) == 30,
            f"{_of(good, found)}, {stale} stale, {seen:,} rounds with the kernel seen running",
        )

    def without(check: Tell) -> None:
        ways = s["order without memguard"]["ways"]
        check(
            "by hand without order: stale at least once",
            any(one["stale"] for one in ways.values()),
            "; ".join(f"{name}: {one['stale']} of {one['rounds']}" for name, one in ways.items()),
        )

    def dropped(check: Tell) -> None:
        found, by_hand = s["dropped"]["dropped"], s["dropped"]["without"]
        wrong = {name: f"{one['wrong']} wrong of {one['rounds']}" for name, one in found.items()}
        good = all(one["rounds"] >= 100 and one["wrong"] == 0 for one in found.values())
        check("a view dropped while it is still read: right values", good and len(found) >= 5, str(wrong))
        lenders = {name.partition(" > ")[0] for name in found}
        fail = {name.partition(" > ")[0] for name, one in by_hand.items() if one["wrong"]}
        check(
            "by hand, dropped while it is still read: wrong for each lender",
            bool(lenders) and lenders <= fail,
            str({name: f"{one['wrong']} wrong of {one['rounds']}" for name, one in by_hand.items()}),
        )

    def lent(check: Tell) -> None:
        found = s["lent"]["lent"]
        good = [
            name for name, one in found.items()
            if one["lent"] == one["nbytes"] and not one["before"] and not one["after"] and one["nvml_growth"] == 0
            and one.get("sum_minus_total") == 0 and one["nvml"] > 0
        ]  # fmt: skip
        check("lent: in the ledger while a view lives, charged once", len(good) == 30, _of(good, found))

    def leak(check: Tell) -> None:
        one = s["leak"]
        growth = one["nvml_after"] - one["nvml_before"]
        check(
            "10,000 hand-overs: +- 0 bytes of the GPU, at most 16 MiB of the host",
            one["hand_overs"] >= 10_000
            and one["nvml_before"] > 0
            and growth == 0
            and one["rss_growth_kib"] <= 16 << 10
            and one["open"] == 0,
            f"{growth:+d} bytes in {one['hand_overs']:,}, {one['open']} not ended, "
            f"host memory {one['rss_growth_kib'] / 1024:+.1f} MiB",
        )

    def killed(check: Tell) -> None:
        one = s["killed"]
        growth, held = one["nvml_after"] - one["nvml_before"], one["nvml_exported"] - one["nvml_before"]
        good = growth == 0 and held >= one["bytes"] and one["attached"] == [1, 0]
        good = good and one["child_returncode"] == -9 and one["child"]["last"] == one["last"]
        check(
            "a process that attached is killed with -9: the memory goes back",
            good,
            f"{held / MIB:,.0f} MiB exported, {growth:+d} bytes after",
        )

    def routes(check: Tell) -> None:
        found = s["routes"]["routes"]
        ms = {name: route.get("ms", route.get("error")) for name, route in found.items()}
        check("routes: each timed", all(isinstance(one, (int, float)) for one in ms.values()) and len(ms) >= 5, str(ms))

    def nothing_lent(check: Tell) -> None:
        left = {name: one["open"] for name, one in s.items() if one.get("open")}
        told = [name for name, one in s.items() if "open" in one]
        check("nothing stays lent", bool(told) and not left, str(left or f"in none of {len(told)} scenarios"))

    controls = ("misaligned into TensorFlow", "reversed into PyTorch")
    both = {**s, "nothing stays lent": {}}
    judges: dict[str, Judge] = {
        "pairs": pairs,
        "dtypes": lambda check: _dtype_checks(s["dtypes"]["dtypes"], TAKES, check),
        "edges from *": edges,
        **{f"control: {name}": control(name) for name in controls},
        "order from *": order,
        "order without memguard": without,
        "dropped": dropped,
        "speed": lambda check: _speed_checks(s["speed"], check),
        "lent": lent,
        "leak": leak,
        "killed": killed,
        "routes": routes,
        "peers": lambda check: _peer_checks(s["peers"], six, check),
        "nothing stays lent": nothing_lent,
    }
    listed = _listed.of_exchange(s)
    dies = tuple(f"control: {name}" for name in controls)
    return judged(listed, {name: judge for name, judge in judges.items() if name in listed}, both, dies)


def _of(good: list[str], every: dict[str, Any]) -> str:
    """How many of how many, and which not."""
    return f"{len(good)} of {len(every)} {', '.join(sorted(set(every) - set(good)))[:300]}".rstrip()


def _dtype_checks(matrix: dict[str, dict[str, str]], takes: dict[str, frozenset[str]], check: Any) -> None:
    shared = refused = 0
    wrong: list[str] = []
    made: dict[str, set[str]] = {}
    for pair, dtypes in matrix.items():
        source, _, target = pair.partition(" > ")
        for dtype, outcome in dtypes.items():
            if outcome.startswith("not made"):
                continue
            made.setdefault(source, set()).add(dtype)
            shared += outcome == "shared"
            refused += outcome.startswith("CannotShare")
            if outcome != "shared" if dtype in takes[target] else not outcome.startswith("CannotShare"):
                wrong.append(f"{pair} {dtype}: {outcome}")
    few = sorted(name for name, dtypes in takes.items() if len(made.get(name, ())) < min(len(dtypes), 14))
    check(
        "dtypes: shared or refused as documented, all 30 pairs",
        len(matrix) == 30 and not wrong and not few,
        f"{shared} shared, {refused} refused {'; '.join(wrong[:6])} {few or ''}".rstrip(),
    )


def _speed_checks(speed: dict[str, Any], check: Any) -> None:
    extra = {name: one["extra_us"] for name, one in speed["speed"].items()}
    good = [name for name, figure in extra.items() if figure is not None and figure <= 50]
    known = [(figure, name) for name, figure in extra.items() if figure is not None]
    worst = max(known, default=(0, "none"))
    size = speed["bytes"] / GIB
    check(
        "1 GiB, idle: at most 50 us over the best route by hand, 30 pairs",
        len(good) == 30 and size >= 1 and speed["rounds"] >= 200,
        f"{_of(good, extra)}; at most {worst[0]:+.1f} us ({worst[1]})",
    )
    down, up = speed["host"]["to_host_ms"], speed["host"]["from_host_ms"]
    times = {}
    for name, one in speed["speed"].items():
        source, _, target = name.partition(" > ")
        times[name] = (down[source] + up[target]) * 1e3 / one["memguard"]["median_us"]
    slowest = min(times, key=lambda name: times[name])
    check(
        "against the host route, in the same run",
        all(ratio > 1 for ratio in times.values()),
        f"{times[slowest]:,.0f} times as quick at least ({slowest})",
    )


def _peer_checks(peers: dict[str, Any], six: set[str], check: Any) -> None:
    found = peers["peers"]
    good = [name for name, one in found.items() if one.get("right") and "cuda:0 to cuda:1" in one.get("route", "")]
    check("two GPUs: copied from one to the other, all six", set(good) == six, _of(good, found))
    refused = [name for name, one in found.items() if one.get("without_copy", "").startswith("CannotShare")]
    check("two GPUs: not shared across them", set(refused) == six, _of(refused, found))
    raw = peers.get("by_route_gb_per_s", {})
    good, wrong = [], []
    for name, one in found.items():
        rate, said = one.get("gb_per_s"), one.get("route", "").partition(", ")[2]
        if rate and len(raw) == 2 and raw["peer to peer"] > 2 * raw["through the host"]:
            near = min(raw, key=lambda way, rate=rate: max(raw[way] / rate, rate / raw[way]))
            if said == near or (not said and name == "jax"):  # which does not tell how it copies
                good.append(name)
                continue
        wrong.append(f"{name} says {said or 'nothing'} at {rate or 'no'} GB/s")
    check(
        "two GPUs: the route that is said is the one that the rate shows, all six",
        set(good) == six,
        f"{_of(good, found)}; the driver's own copies: {raw or 'not measured'} {'; '.join(wrong)}".rstrip(),
    )


PEERS_CAP, PEERS_GENERATIONS, PEERS_ROUNDS = 4 * GIB, 3, 12
"""What a whole run of `peers.py` has at least; the rounds are those of all generations."""
PEERS_SERVED = 0.1
"""A pool serves if no more of its allocations ask the driver."""
PEERS_ALIKE = 1.10
"""Two processes of one way may differ so much. If they differ more, the run shows nothing."""
PEERS_SLACK = 8 * MIB
"""So far below its part of the cap a library's memory may stay: blocks do not fill every gap."""


def peers_rounds(result: dict[str, Any]) -> int:
    """In all generations, of the library with the fewest. Older results had equally many of each."""
    counts = result.get("rounds_of")
    return min(map(sum, counts.values())) if counts else result["generations"] * result["rounds"]


def peers_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `peers.py`. The list of them is that of the libraries and ways, whatever was measured."""
    from _spread import resolved
    from _ways import AGAIN, AT_ITS_END, CONTROLLED, SHARES, SIZES, WAYS, cell

    found: dict[str, tuple[bool, str]] = {}
    every, runs = result["cells"], peers_rounds(result)
    found["a whole run on a GPU"] = (
        result["about"]["gpu"] is not None
        and result["cap"] >= PEERS_CAP
        and result["generations"] >= PEERS_GENERATIONS
        and runs >= PEERS_ROUNDS,
        f"{result['about']['gpu'] or 'no GPU'}, {result['cap'] / GIB:g} GiB, {runs} rounds with "
        f"{result['generations']} generations of processes",
    )

    def ratio(library: str, way: str, where: str) -> dict[str, Any] | None:
        one: dict[str, Any] | None = every.get(library, {}).get(where, {}).get("ratios", {}).get(way)
        return None if one is None else one["both_us"]

    for library, ways in WAYS.items():
        cells = {cell(size, share): share for size in SIZES for share in SHARES}
        lacking = [
            f"{way}, {where}" for where in cells for way in ways
            if way not in every.get(library, {}).get(where, {}).get("ways", {})
        ]  # fmt: skip
        reasons = {**result["missing"].get(library, {}), **result["failed"].get(library, {})}
        why = "; ".join(f"{way}: {said}" for way, said in reasons.items())
        found[f"{library}: every way measured"] = (
            not lacking, f"{len(cells) * len(ways) - len(lacking)} of {len(cells) * len(ways)} {why[:300]}".rstrip()
        )  # fmt: skip
        codes = {way: code for way, code in result["failed"].get(library, {}).items() if way.endswith(AT_ITS_END)}
        found[f"{library}: no process under memguard dies at its end"] = (
            bool(every.get(library)) and not any(way.startswith("memguard") for way in codes),
            "; ".join(f"{way}: {code}" for way, code in codes.items()) or "none dies",
        )
        off = {
            f"{way}, {where}": [(share - part) * result["cap"] for part in one["reached"]]
            for where, share in cells.items()
            for way, one in every.get(library, {}).get(where, {}).get("ways", {}).items()
        }
        wrong = [name for name, gaps in off.items() if min(gaps) < 0 or max(gaps) > PEERS_SLACK]
        found[f"{library}: filled to its part of the cap"] = (
            len(off) == len(cells) * len(ways) and not wrong, _of([name for name in off if name not in wrong], off)
        )  # fmt: skip
        controls = {f"{way}, {where}": ratio(library, way + AGAIN, where) for way in CONTROLLED[library]
                    for where in cells}  # fmt: skip
        known = {name: resolved(one) for name, one in controls.items() if one is not None}
        worst = max(known, key=lambda name: known[name], default=None)
        found[f"{library}: two processes of one way are alike within {PEERS_ALIKE - 1:.0%}"] = (
            len(known) == len(controls) and all(one <= PEERS_ALIKE for one in known.values()),
            "not run" if worst is None else f"{known[worst]:.3f} at most ({worst})",
        )
    for share in SHARES:
        where = {cell(size, share) for size in SIZES}
        for way, says in (("memguard", "mem_alloc"), ("memguard, pool", "DeviceMemoryPool")):
            found[f"PyCUDA's {says} at {share:.1%}: <= 2.5 x its own pool, or 2 us"] = _bar(
                result, "pycuda", way, where, lambda one, us, _: one["median"] <= 2.5 or us <= 2
            )
        served = {name for name in where if _asks(result, name) <= PEERS_SERVED}
        # Near the cap nothing may be kept idle. Elsewhere a pool that does not serve is none.
        bar = _bar(result, "numba", "memguard", served if share > 0.9 else where, lambda one, us, _: one["median"] <= 1)
        rest = "".join(f"; {name}: asks the driver {_asks(result, name):.2f} times" for name in sorted(where - served))
        found[f"Numba at {share:.1%}: <= RMM's pool where its pool serves"] = (bar[0], f"{bar[1]}{rest}".lstrip("; "))
        found[f"CuPy at {share:.1%}: <= 1.10 of plain"] = _bar(
            result, "cupy", "memguard", where, lambda one, us, _: one["median"] <= 1.10
        )
        found[f"torch at {share:.1%}: within its control"] = _bar(
            result, "torch", "memguard", where,
            lambda one, us, control: control is not None and one["median"] <= resolved(control),
        )  # fmt: skip
    return found


def _asks(result: dict[str, Any], where: str) -> float:
    """How often an allocation of Numba's asks the driver under memguard. Never, if nothing excuses it."""
    ways = result["cells"].get("numba", {}).get(where, {}).get("ways", {})
    return float(ways.get("memguard", {}).get("asks", 0.0))


def _bar(result: dict[str, Any], library: str, way: str, where: set[str], holds: Any) -> tuple[bool, str]:
    """Whether a way's ratio holds in each of these cells, and the figures.

    `holds` gets the ratio, the microseconds, and the ratio of two processes of the way that it is compared with.
    """
    from _ways import AGAIN

    good, said = True, []
    for name in sorted(where):
        one = result["cells"].get(library, {}).get(name, {"ways": {}, "ratios": {}})
        ratio, times = one["ratios"].get(way), one["ways"].get(way)
        control = None if ratio is None else one["ratios"].get(ratio["to"] + AGAIN)
        if ratio is None or times is None:
            good = False
            said.append(f"{name}: not run")
            continue
        us, spread = times["both_us"], ratio["both_us"]
        good = good and holds(spread, us, None if control is None else control["both_us"])
        figure = f"{name}: {spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f}), {us:.2f} us"
        if control is not None:
            figure += f", control {control['both_us']['low']:.3f} to {control['both_us']['high']:.3f}"
        said.append(figure)
    return good, "; ".join(said)


TRAINING, TRAINING_PAIRS, TRAINING_MOST = ("ResNet-50", "GPT"), 100, 1.005
"""The programs of `training.py`, the pairs that each has at least, and what watching may cost beyond the control."""
TRAINING_HZ = 8, 12
"""Samples a second of a monitor of 10 Hz, at least and at most: fewer would be cheap, and more were miscounted."""


def training_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `training.py`."""

    def program(name: str) -> Judge:
        def judge(check: Tell) -> None:
            one = result["scenarios"][name]
            bar = f"{name}: 95 % bound of {TRAINING_PAIRS} interleaved pairs <= {TRAINING_MOST} beyond the control"
            held = f"{name}: under a budget, with samples at 10 Hz, and in the control without"
            if "skipped" in one:
                for about in (bar, held):
                    check(about, False, f"not run: {one['skipped']}")
                return
            beyond, ratio, control = one["beyond"], one["ratio"], one["control"]
            check(
                bar,
                result["about"]["gpu"] is not None
                and one["pairs"] >= TRAINING_PAIRS
                and beyond["high"] <= TRAINING_MOST,
                f"{beyond['median']:.4f} ({beyond['low']:.4f} to {beyond['high']:.4f}); watched "
                f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f}), control {control['median']:.4f} "
                f"({control['low']:.4f} to {control['high']:.4f}), {one['pairs']} pairs of {one['steps']} steps of "
                f"{one['step_ms']:.1f} ms",
            )
            rate = one["samples"] / one["watched_s"] if one["watched_s"] else 0.0
            low, high = TRAINING_HZ
            check(
                held,
                low <= rate <= high
                and one["without_a_sample"] <= one["pairs"] // 5
                and one["active"] == {"watched": [True], "without": [False], "again": [False]},
                f"{one['samples']} samples in {one['watched_s']:.1f} s ({rate:.1f} Hz), {one['without_a_sample']} of "
                f"{one['pairs']} segments without one, active: {one['active']}",
            )

        return judge

    return judged(_listed.TRAINING, {name: program(name) for name in TRAINING}, result["scenarios"])


INIT_MS, FRESH_MS = 50, 60
"""For `init` with its dependencies loaded, and for what a fresh interpreter takes beyond their imports."""


def init_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `init.py`. A check whose way did not run has failed."""
    ways, differences, where = result["ways"], result["difference"], f"; the GPU is {result['about']['gpus_are']}"
    found: dict[str, tuple[bool, str]] = {}
    for what, way in (("six frameworks, its dependencies loaded", "init"), ("six that are imported", "imported")):
        name = f"init of {what}, nvmlInit apart <= {INIT_MS} ms, 95 % of the readings"
        control = differences.get("init again")
        if way not in ways or (way == "init" and control is None):
            found[name] = (False, "did not run")
            continue
        one, nvml = ways[way]["without_nvml_init"], ways[way]["nvml_init"]["median_ms"]
        again = f", the same again {control['median_ms']:+.1f} ms" if way == "init" else ""
        figure = f"median {one['median_ms']:.1f} ms, p95 {one['p95_ms']:.1f} ms in {one['n']} rounds{again}"
        absent = [name for name, cap in ways[way]["caps"].items() if cap == "absent"]
        missing = f"; not installed for a GPU: {', '.join(absent)}" if absent else ""
        found[name] = (one["p95_ms"] <= INIT_MS, f"{figure}; nvmlInit {nvml:.1f} ms{missing}{where}")
    name = (
        f"init in a fresh interpreter <= {FRESH_MS} ms more than the imports of pydantic, PyYAML and nvidia-ml-py, "
        "nvmlInit apart, upper 95 % bound of the median difference"
    )
    more, control = differences.get("fresh"), differences.get("their imports again")
    if more is None or control is None:
        found[name] = (False, "did not run")
    else:
        figure = f"{more['median_ms']:+.1f} ms ({more['low_ms']:+.1f} to {more['high_ms']:+.1f}) in {more['n']} rounds"
        span = f"{control['low_ms']:+.1f} to {control['high_ms']:+.1f}"
        figure += f"; their imports again {control['median_ms']:+.1f} ({span})"
        found[name] = (more["high_ms"] <= FRESH_MS, f"{figure}{where}")
    return found


QUIET_SECONDS = 120


def moment_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `moment.py`: every field of every report right, advice that helps where it promises to, no alarm."""
    from _moment import verdict

    def program(name: str) -> Judge:
        def judge(check: Tell) -> None:
            one = result["programs"][name]
            wrong = list(verdict(one))
            right = "; ".join(f"{field} {figure.partition(' (')[0]}" for field, (_, figure) in one["fields"].items())
            check(
                f"{name}: reason, requester, bytes, holder and advice",
                not wrong and len(one["fields"]) >= 6,
                "; ".join(wrong) or right,
            )
            followed, about = one["followed"], f"{name}: followed advice helps"
            # Each program was arranged so that some advice can be followed: none is a wording that was not understood.
            if followed["tried"]:
                check(about, bool(followed["helped"]), f"{followed['advice'][:100]}: {followed['figure']}")
            else:
                check(about, False, f"nothing could be followed: {'; '.join(followed['skipped'])}")

        return judge

    def quiet(name: str) -> Judge:
        def judge(check: Tell) -> None:
            one = result["quiet"][name]
            if "alarms" not in one:
                raise LookupError(one.get("failed", "it failed"))
            ran_for = min(one["asked_seconds"], one["seconds"])
            long_enough = one["done"] and one["returncode"] == 0 and ran_for >= QUIET_SECONDS
            said = " | ".join(one["alarms"][:3])
            figure = f"{ran_for:.0f} s, rc {one['returncode']}, {len(one['alarms'])} alarms {said}".rstrip()
            check(f"{name}: two minutes, no alarm", long_enough and not one["alarms"] and not one["report"], figure)

        return judge

    # The programs are to fail: how each ended is one of its fields.
    scenarios = {**result["programs"], **result["quiet"]}
    judges: dict[str, Judge] = {
        **{name: program(name) for name in _listed.PROGRAMS},
        **{name: quiet(name) for name in _listed.QUIET},
    }
    return judged(_listed.MOMENT, judges, scenarios, dies=tuple(scenarios))


def their_tests_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `their_tests.py`: every test run both ways, and no difference without a reason."""

    def suite_of(name: str) -> Judge:
        def judge(check: Tell) -> None:
            suite = result["suites"][name]
            left = [*suite["not_run"], *suite["not_collected"]]
            some = ", ".join(left[:3])
            check(
                f"{name}: every test of its own run both ways",
                suite["run"] > 0 and not left and not result["simulated"],
                f"{suite['run']} of {suite['collected']}" + (f", left {len(left)}: {some} ..." if left else ""),
            )
            check(
                f"{name}: under memguard a budget is active",
                suite["run"] > 0 and not suite["inactive"],
                f"{len(suite['inactive'])} processes without one {', '.join(suite['inactive'][:3])}".rstrip(),
            )
            unexplained = [one for one in suite["differences"] if one["reason"] is None]
            reasons = ", ".join(f"{one['test']}: {one['reason']}" for one in suite["differences"] if one["reason"])
            check(
                f"{name}: no difference without a reason",
                suite["run"] > 0 and not unexplained,
                f"{len(unexplained)} of {len(suite['differences'])} differences have none: "
                f"{', '.join(one['test'] for one in unexplained[:6]) or '-'}; {reasons or 'none has one'}",
            )

        return judge

    return judged(_listed.THEIR_TESTS, {name: suite_of(name) for name in ("pycuda", "numba")}, result["suites"])


def light_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `light.py`."""

    def ms(value: dict[str, float], digits: int = 1) -> str:
        return f"median {value['median'] * 1e3:.{digits}f} ms, p95 {value['p95'] * 1e3:.{digits}f} ms"

    def imported(check: Tell) -> None:
        ratio = result["import"]["ratio"]
        figure = f"median {ratio['median']:.2f}, p95 {ratio['p95']:.2f}"
        check("import memguard <= 1.5 x import pydantic, yaml", ratio["p95"] <= 1.5, figure)

    def init(check: Tell) -> None:
        found = result["init"]
        where = " (simulated GPU)" if found["simulated"] else ""
        alone, everything = found["init_s"], found["import_and_init_s"]
        check(
            "init, no framework imported, its dependencies loaded <= 50 ms", alone["p95"] <= 0.05, f"{ms(alone)}{where}"
        )
        check(
            "init in a fresh interpreter, the imports of pydantic, PyYAML and nvidia-ml-py included <= 50 ms",
            everything["p95"] <= 0.05,
            f"{ms(everything)}{where}",
        )

    def plan(check: Tell) -> None:
        took = result["plan"]["plan_s"]
        check("a plan of 6 frameworks x 8 GPUs <= 1 ms", took["p95"] <= 1e-3, ms(took, 2))

    judges: dict[str, Judge] = {"import": imported, "init": init, "plan": plan}
    return judged(_listed.LIGHT, judges, {name: result[name] for name in judges if name in result})


def startup_checks(result: dict[str, Any], measured: dict[str, Any] | None = None) -> dict[str, tuple[bool, str]]:
    """The bars of `startup.py`. `measured`: what its starts came to, if that is not in the result itself."""

    def start(check: Tell) -> None:
        more, control = result["difference"]["with"], result["difference"]["again"]
        check(
            "a start without MEMGUARD_CONFIG <= 1 ms longer, upper 95 % bound of the median difference",
            more["high_ms"] <= 1,
            f"{more['median_ms']:+.2f} ms ({more['low_ms']:+.2f} to {more['high_ms']:+.2f}) in {more['n']} rounds; two "
            f"without the file {control['median_ms']:+.2f} ({control['low_ms']:+.2f} to {control['high_ms']:+.2f})",
        )

    def alone(check: Tell) -> None:
        one = result["alone"]
        figure = f"median {one['median_ms']:.3f} ms, p95 {one['p95_ms']:.3f} ms"
        check("the file alone <= 1 ms, 95 % of the readings", one["p95_ms"] <= 1, figure)

    of = {"start": measured if measured is not None else result, "alone": result.get("alone")}
    return judged(
        _listed.STARTUP, {"start": start, "alone": alone}, {name: one for name, one in of.items() if one is not None}
    )


LONG_REPLAY = 60.0
"""Seconds that the replay of a million samples may take."""
MORE_MEMORY = 1.1
"""What ten times the length may need, as a ratio."""


def replay_checks(result: dict[str, Any], asked: Sequence[int] = (100_000, 1_000_000)) -> dict[str, tuple[bool, str]]:
    """The bars of `replay.py`, for replays of these many samples."""
    runs = result["runs"]

    def long(check: Tell) -> None:
        last = runs[-1]
        good = last["seconds"] <= LONG_REPLAY and last["samples"] == 1_000_000
        check(
            "replay of 1,000,000 samples <= 60 s",
            good,
            f"{last['seconds']:.1f} s, {last['cpu_seconds']:.1f} s of one core, {last['samples']:,} samples",
        )

    def both(check: Tell) -> None:
        first, last = runs[0], runs[-1]
        ratio = last["peak_rss_kib"] / first["peak_rss_kib"]
        check(
            "memory independent of length, by the process's own peak",
            ratio <= MORE_MEMORY and all(run.get("peak_rss_of") == "VmHWM" for run in runs),
            f"{first['peak_rss_kib'] / 1024:.1f} MiB for {first['samples']:,} samples, "
            f"{last['peak_rss_kib'] / 1024:.1f} MiB for {last['samples']:,}",
        )
        told = ", ".join(f"{run['samples']:,}" for run in runs)
        check("every sample is replayed", [run["samples"] for run in runs] == list(asked), told)

    # The command ends with 0, or with 1 where the budget would have refused something. Any other code is a death.
    ended = [{} if run.get("returncode") in (0, 1) and "seconds" in run else {**run, "returncode": 2} for run in runs]
    broken = next((run for run in ended if run), {})
    return judged(_listed.REPLAY, {"long": long, "both": both}, {"long": ended[-1], "both": broken})


def ddp_checks(ranks: list[dict[str, Any]]) -> dict[str, tuple[bool, str]]:
    """The bars of `ddp.py`, for each rank."""
    by_name = {f"rank {one.get('rank')}": one for one in ranks}

    def of(name: str) -> Judge:
        def judge(check: Tell) -> None:
            one = by_name[name]
            readings = one["readings"]
            at = {r["label"]: r for r in readings}
            nccl = at["second communicator"]["overhead"] - at["first tensor"]["overhead"]
            worst = max(readings, key=lambda r: abs(r["unaccounted"]))
            over = max(r["overhead"] for r in readings)
            most = max(r["process"] for r in readings)
            wrong = [r["label"] for r in readings if any(r["sums_minus_total"])]
            check(
                f"{name}: rows add up to the total on both GPUs (plain sanity: unaccounted is the remainder)",
                not wrong,
                f"{len(readings)} readings {wrong or ''}",
            )
            check(
                f"{name}: |unaccounted| <= 64 MiB",
                abs(worst["unaccounted"]) <= 64 * MIB,
                f"{worst['unaccounted'] / MIB:.1f} MiB ({worst['label']})",
            )

            def emptied() -> tuple[bool, str]:
                full, freed = at["full"], at["freed and trimmed"]
                both = {key: [full[key], freed[key]] for key in ("held", "nvml")}
                return agrees(both, 2 * MIB, one["cap"] // 2)

            _told(check, f"{name}: held agrees with what the driver has back when it is emptied", emptied)
            check(
                f"{name}: NCCL's memory is in the reserve",
                nccl >= GIB and over <= one["reserve"],
                f"overhead {over / MIB:.0f} of {one['reserve'] / MIB:.0f} MiB, {nccl / MIB:.0f} of it since NCCL",
            )
            check(f"{name}: process <= limit", 0 < most <= 16 * GIB, f"{most / MIB:,.0f} of {16 * GIB / MIB:,.0f} MiB")
            held = max(r["held"] for r in readings)
            check(
                f"{name}: held <= cap, own error",
                0.95 * one["cap"] <= held <= one["cap"] and one["refused"] == "OutOfMemoryError",
                f"{held / MIB:,.0f} of {one['cap'] / MIB:,.0f} MiB, {one['refused']}",
            )
            check(
                f"{name}: trains, weights equal on both",
                one["losses"][1] < one["losses"][0] and one["weights_equal"],
                f"loss {one['losses'][0]:.3f} to {one['losses'][1]:.3f}",
            )

        return judge

    ended = {
        name: one if "readings" in one else {"returncode": one.get("returncode") or 1, "stderr_tail": one.get("stderr")}
        for name, one in by_name.items()
    }
    return judged(_listed.DDP, {name: of(name) for name in _listed.DDP}, ended)
