"""The bars of `main_job.py`, each as (passed, figure). Pure, so that they can be checked again on a committed JSON."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
GIB = 1 << 30


def main_job_checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    found: dict[str, tuple[bool, str]] = {}

    def check(name: str, passed: bool, figure: str) -> None:
        found[name] = (bool(passed), figure)

    together = s.get("together", {})
    if "driven" in together:
        check("sum of caps >= 37 GiB", together["sum_of_caps"] >= 37 * GIB, f"{together['sum_of_caps'] / GIB:.2f} GiB")
        for name, driven in together["driven"].items():
            check(
                f"{name}: held <= cap",
                driven["held_within_cap"],
                f"{driven['most_held'] / MIB:.1f} of {driven['cap'] / MIB:.0f} MiB",
            )
            check(
                f"{name}: own native type", all(p["native"] for p in driven["phases"]), driven["phases"][0]["exception"]
            )
        for name in ("torch", "pycuda"):
            fitted = [p["would_have_fitted"] for p in together["driven"][name]["phases"]]
            check(f"{name}: no refusal where it would fit", fitted == [False, False], str(fitted))
        log = together.get("tensorflow_log", [])
        refused = [p["refused_bytes"] for p in together["driven"]["tensorflow"]["phases"]]
        fits = [entry["available"] >= -(-size // 4 * 4 // 256) * 256 for entry, size in zip(log, refused)]
        pools = ", ".join(f"{e['available']} B available" for e in log)
        cap = together["caps"]["tensorflow"]
        check(
            "tensorflow: no refusal where it would fit",
            bool(log) and len(log) >= 2 and not any(fits),
            f"{pools}, by its own log",
        )
        limits = {e["memory_limit"] for e in log}
        told = bool(log) and all(e["pool"] <= e["memory_limit"] for e in log) and max(limits) <= cap * 1.0005
        check("tensorflow: pool <= cap", told, f"{log[-1]['text'] if log else 'no log'}; cap {cap / MIB:.0f} MiB")
        most = together["nvml"]["max_bytes"]
        check(
            "process <= 40 GiB at every 50 ms sample",
            0 < most <= 40 * GIB,
            f"{most / GIB:.3f} GiB, {together['nvml']['samples']} samples",
        )
        readings = together["readings"]
        check(
            "together: ledger sums to NVML's total",
            all(r["sum_minus_total"] == 0 for r in readings),
            f"{len(readings)} readings",
        )
    pair = s.get("torch_and_pycuda", {})
    if "readings" in pair:
        readings = pair["readings"]
        check(
            "torch + PyCUDA: ledger sums to NVML's total",
            all(r["sum_minus_total"] == 0 for r in readings),
            f"{len(readings)} readings",
        )
        worst = max(readings, key=lambda r: abs(r["unaccounted"]))
        check(
            "torch + PyCUDA: unaccounted <= 64 MiB",
            abs(worst["unaccounted"]) <= 64 * MIB,
            f"{worst['unaccounted'] / MIB:.1f} MiB ({worst['label']})",
        )
    for name, slack in (("torch_expandable", 0), ("torch_async", 0)):
        alone = s.get(name, {})
        if "cap" in alone:
            growth = max(alone["nvml_growth"], alone["nvml_growth_after_churn"])
            check(
                f"{name}: held <= cap",
                growth <= alone["cap"] + slack,
                f"{growth / MIB:.1f} of {alone['cap'] / MIB:.0f} MiB by NVML",
            )
            check(
                f"{name}: own native type", all(p["native"] for p in alone["phases"]), alone["phases"][0]["exception"]
            )
            fitted = [p["would_have_fitted"] for p in alone["phases"]]
            check(f"{name}: no refusal where it would fit", not any(fitted), str(fitted))
    control = s.get("order_control", {})
    check(
        "TensorFlow before torch, control dies by signal 8",
        control.get("returncode") == -8,
        f"rc {control.get('returncode')}",
    )
    for name in ("order_cured", "order_cured_tensorflow_first"):
        cured = s.get(name, {})
        good = cured.get("matmul_finite") is True and cured.get("multiprocessors") == 132
        check(f"{name}: torch matmul, 132 multiprocessors", good, f"{cured.get('multiprocessors')}")
    before = s.get("without_memguard", {})
    if "tensorflow_took" in before:
        died = all(before[n]["exception"] for n in ("torch", "pycuda"))
        check(
            "without memguard: torch and PyCUDA die", died, f"TensorFlow took {before['tensorflow_took'] / MIB:.0f} MiB"
        )
    undone = s.get("tensorflow-undone", {})
    if "limited_mib" in undone:
        good = undone["limited_mib"] == 2048 and not undone["configuration_after"] and undone["environment_restored"]
        good = good and undone["allocated_after_shutdown"] > 2 * GIB
        check(
            "tensorflow undone before its first operation",
            good,
            f"{undone['allocated_after_shutdown'] / GIB:.0f} GiB after shutdown",
        )
    for framework in ("torch", "tensorflow", "pycuda"):
        for when in ("later", "imported", "live"):
            c = s.get(f"{framework}-{when}", {})
            if "refused" in c:
                check(f"{framework} {when}", c["expected"], "CapNotApplied: too late")
            elif "held" in c:
                room = c["allocated_before_init"]
                held = c["raised"] is not None and c["allocated_under_cap"] + (
                    room if framework == "torch" else 0
                ) <= max(c["cap"], room)
                undone = c["allocated_after_shutdown"] == 40 * 64 * MIB
                declared = undone or any(framework in sentence for sentence in c["stays"])
                check(
                    f"{framework} {when}",
                    held and declared,
                    f"{c['enforcement']}, {'undone' if undone else 'stays, and says so'}",
                )
            else:
                check(f"{framework} {when}", False, f"rc {c.get('returncode')}")
    return found


def all_frameworks_checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """What every framework under one budget must show, each with its figure."""
    found: dict[str, tuple[bool, str]] = {}

    def check(name: str, passed: bool, figure: str) -> None:
        found[name] = (bool(passed), figure)

    together = s.get("together", {})
    if "driven" in together:
        check(
            "six: sum of caps >= 36 GiB",
            together["sum_of_caps"] >= 36 * GIB,
            f"{together['sum_of_caps'] / GIB:.2f} GiB",
        )
        for name, one in together["driven"].items():
            most, cap, refusals = one["most_held"], one["cap"], one["refusals"]
            # and not much less: an allocator that refuses early holds little
            held = 0.95 * cap <= most <= cap
            check(f"six: {name} held <= cap", held, f"{most / MIB:,.1f} of {cap / MIB:,.0f} MiB")
            native = len(refusals) == 4 and all(r["native"] for r in refusals)
            check(f"six: {name} refuses with its own error", native, f"{len(refusals)} x {refusals[0]['exception']}")
            if name != "tensorflow":
                fitted = [r["would_have_fitted"] for r in refusals]
                check(f"six: {name} no refusal where it would fit", not any(fitted), str(fitted))
        log = together.get("tensorflow_log", [])
        limits = {entry["memory_limit"] for entry in log}
        told = len(log) >= 4 and all(e["pool"] <= e["memory_limit"] for e in log)
        cap = together["caps"]["tensorflow"]
        told = told and max(limits) <= cap * 1.0005
        check("six: tensorflow pool <= cap, by its log", told, log[-1]["text"] if log else "no log")
        most = together["nvml"]["max_bytes"]
        samples = together["nvml"]["samples"]
        check(
            "six: process <= 40 GiB at every sample",
            0 < most <= 40 * GIB and _watched(together),
            f"{most / GIB:.3f} GiB, {samples} samples, at most {together['nvml']['longest_gap_ms']:.0f} ms apart",
        )
        wrong = [r["label"] for r in together["readings"] if r["sum_minus_total"] != 0]
        check("six: ledger sums to NVML's total", not wrong, f"{len(together['readings'])} readings, wrong: {wrong}")
        over = max(r["overhead"] for r in together["readings"])
        check(
            "six: overhead within the reserve",
            over <= together["reserve"],
            f"{over / MIB:.0f} of {together['reserve'] / MIB:.0f} MiB",
        )
    pairs = {name: one for name, one in s.items() if name.count("-") == 1}
    if pairs:
        good = [n for n, one in pairs.items() if _pair_holds(one)]
        bad = sorted(set(pairs) - set(good))
        check(
            "30 import orders alive and capped", len(good) == 30 and not bad, f"{len(good)} of {len(pairs)}{bad or ''}"
        )
    for name in (f"{n}, {w}" for n in ("cupy", "jax", "numba") for w in ("later", "imported", "live")):
        one = s.get(name, {})
        if "too_late" in one:
            late = name in ("jax, live", "numba, live") and "it was live before" in one["too_late"]
            check(name, late, "CapNotApplied: it was live before memguard.init()")
        elif "refusals" in one:
            room = one["allocated_before_init"]
            held = one["refusals"][0]["native"] and one["most_held"] <= max(one["cap"], room * 64 * MIB)
            undone = one["allocated_after_shutdown"] == 40
            declared = undone or any(sentence.startswith(name.partition(",")[0]) for sentence in one["stays"])
            check(
                name,
                held and declared and one["enforcement"] == "enforced",
                "undone" if undone else "stays, and says so",
            )
        elif name in s:
            check(name, False, f"rc {one.get('returncode')}")
    loop = s.get("loop", {})
    if "unaccounted_drift" in loop:
        check(
            "loop: five minutes",
            loop["seconds_run"] >= 300,
            f"{loop['seconds_run']} s, {loop['allocated']} allocations",
        )
        drift = loop["unaccounted_drift"]
        check(
            "loop: drift of unaccounted <= 64 MiB",
            drift <= 64 * MIB,
            f"{drift / MIB:.1f} MiB in {loop['readings']} readings",
        )
        check("loop: each refused", all(loop["refused"].values()), str(loop["refused"]))
        check(
            "loop: own errors only",
            not any(loop["not_native"].values()),
            str({k: v for k, v in loop["not_native"].items() if v}),
        )
        over = {n: one["most_held"] - one["cap"] for n, one in loop["driven"].items() if one["most_held"] > one["cap"]}
        check("loop: held <= cap", not over, str(over or "all six"))
        check("loop: ledger sums to NVML's total", loop["sum_minus_total"] == 0, f"{loop['readings']} readings")
        most = loop["nvml"]["max_bytes"]
        check(
            "loop: process <= 40 GiB at every sample",
            0 < most <= 40 * GIB and _watched(loop),
            f"{most / GIB:.3f} GiB, {loop['nvml']['samples']} samples, "
            f"at most {loop['nvml']['longest_gap_ms']:.0f} ms apart",
        )
    hour = s.get("simulated_hour", {})
    if "unaccounted_drift" in hour:
        from simulated_hour import wrong

        failed = wrong(hour)
        drift, refused = hour["unaccounted_drift"] / MIB, sum(hour["refused"].values())
        check("simulated hour", not failed, f"drift {drift:.1f} MiB, {refused} refusals {failed or ''}".strip())
    elif "simulated_hour" in s:
        check("simulated hour", False, f"rc {hour.get('returncode')}")
    return found


def _watched(outcome: dict[str, Any]) -> bool:
    """Whether the sampler looked for most of the time (a process is listed once it has a context), without holes."""
    nvml = outcome["nvml"]
    return nvml["samples"] >= 0.75 * outcome["wall_s"] * 20 and nvml["longest_gap_ms"] <= 200


def _pair_holds(one: dict[str, Any]) -> bool:
    if one.get("returncode") != 0 or "found" not in one:
        return False
    capped = all(
        0.75 * driven["cap"] <= driven["allocated"] <= driven["most_held"] <= driven["cap"]
        and driven["refusals"][0]["native"]
        for driven in one["found"].values()
    )
    return capped and set(one["enforcement"].values()) == {"enforced"} and one["sum_minus_total"] == 0


def watch_checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `watch.py`."""
    found: dict[str, tuple[bool, str]] = {}

    def check(name: str, passed: bool, figure: str) -> None:
        found[name] = (bool(passed), figure)

    for name, one in s.items():
        if name.endswith((", own cap", ", card full")) and not one.get("no_cap"):
            _report_checks(name, one, check)
    leak = s.get("leak", {})
    if "leaked" in leak:
        ahead = leak["announced_before_oom_s"]
        check(
            "leak: announced >= 5 s before the OOM",
            ahead is not None and ahead >= 5,
            f"{ahead} s before; {leak['leaked'] / GIB:.1f} GiB leaked in {leak['seconds']} s",
        )
    saw = s.get("sawtooth", {})
    if "alarms" in saw:
        most = ", ".join(f"{name} {part:.0%}" for name, part in saw["most"].items())
        said = [f"{alarm['kind']}: {alarm['text']}" for alarm in saw["alarms"]]
        long_enough = saw["seconds_run"] >= 600
        check(
            "sawtooth: ten minutes, no alarm",
            long_enough and not said,
            f"{saw['seconds_run']:.0f} s, up to {most} of the caps; {len(said)} alarms {' | '.join(said[:3])}".rstrip(),
        )
    if "tick" in s:  # an earlier result has the ticks of an idle process instead, without ring, timeline and actions
        from readings import tick_checks

        found.update(tick_checks(s["tick"].get("at_work")))
    ops = s.get("small ops", {})
    if "ratio" in ops:
        ratio, control = ops["ratio"], ops["control"]
        check(
            "small ops: ratio with the monitor at 10 Hz, upper bound <= 1.02",
            ops["pairs"] >= 60 and ratio["high"] <= 1.02,
            f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f}), control {control['median']:.4f} "
            f"({control['low']:.4f} to {control['high']:.4f}), {ops['pairs']} pairs",
        )
    return found


def _report_checks(name: str, one: dict[str, Any], check: Any) -> None:
    report = one.get("report")
    if report is None:
        check(f"{name}: reported", False, str(one.get("exception", one.get("stderr_tail", "no report")))[-120:])
        return
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
    first = holders[0]["name"] if holders else None
    check(f"{name}: names the largest holder", first == largest, f"{first}: {rows[largest] / MIB:,.0f} MiB")
    for holder in report["holders"]:
        if holder["kind"] != "framework" or holder["reclaimable"] is None:
            continue
        back = one["returned"].get(holder["name"], 0)
        check(
            f"{name}: reclaimable of {holder['name']} within 32 MiB of what a trim frees",
            abs(holder["reclaimable"] - back) <= 32 * MIB,
            f"{holder['reclaimable'] / MIB:,.1f} said, {back / MIB:,.1f} MiB freed",
        )
    reasons = {"own cap": ("cap", "fragmented"), "card full": ("card",)}[name.rpartition(", ")[2]]
    check(f"{name}: says why", report["reason"] in reasons, report["reason"])


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
    found: dict[str, tuple[bool, str]] = {}
    scenarios = result["scenarios"]

    def above_info(name: str) -> set[tuple[str, str]] | None:
        listed = scenarios.get(name, {}).get("findings")
        return None if listed is None else {(f[0], f[2]) for f in listed if f[1] != "info"}

    def said(names: set[tuple[str, str]] | None) -> str:
        return "not run" if names is None else ", ".join(f"{n} ({s})" if s else n for n, s in sorted(names)) or "none"

    plain = above_info("as shipped")
    found["as the machine ships: nothing above info"] = (plain == set(), said(plain))
    found["as the machine ships: what is true of it, and nothing else"] = (
        plain is not None and plain <= OWN,
        said(plain),
    )
    six = above_info("all six")
    found["with the TensorFlow for CUDA 12: what is true of it, and nothing else"] = (six == ADDED | OWN, said(six))
    for name, (expected, beside) in PROVOKED.items():
        shown = above_info(name)
        names = {n for n, _ in shown or ()}
        allowed = {expected, *(n for n, _ in ADDED if beside)}
        found[f"{name}: found and named, and nothing else"] = (expected in names and names <= allowed, said(shown))
    order = scenarios.get("TensorFlow before PyTorch", {})
    listed = [cause for name, _, _, cause in order.get("findings", []) if name == "import-order"]
    found["TensorFlow before PyTorch: PyTorch dies, and is said to"] = (
        bool(listed) and "dies" in listed[0], listed[0] if listed else "not found"
    )  # fmt: skip
    times = result["all_six_s"]
    figure = "not run"
    if times["median"] is not None:
        figure = f"{times['median']:.1f} s median of {len(times['runs'])}, at most {max(times['runs']):.1f} s"
    found["six frameworks <= 20 s"] = (times["median"] is not None and max(times["runs"]) <= 20, figure)
    probes = scenarios.get("all six", {}).get("probes_s", {})
    shown_times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in probes.items() if " then " not in name)
    found["each probe's time shown"] = (len(probes) >= 6, shown_times or "not run")
    return found


def exchange_checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `exchange.py`."""
    from _arrays import TAKES

    found: dict[str, tuple[bool, str]] = {}

    def check(name: str, passed: bool, figure: str) -> None:
        found[name] = (bool(passed), figure)

    def named(beginning: str, key: str) -> dict[str, Any]:
        """What the scenarios whose names begin so have under a key, put together."""
        whole: dict[str, Any] = {}
        for name, one in s.items():
            if name.startswith(beginning):
                whole.update(one.get(key, {}))
        return whole

    for name, one in s.items():
        if one.get("returncode") and not name.startswith("control"):
            check(f"{name}: runs to its end", False, f"rc {one['returncode']}")
    six = set(TAKES)
    pairs = s.get("pairs", {}).get("pairs", {})
    own = {name: one for name, one in pairs.items() if name.partition(" > ")[0] in six}
    if pairs:
        for what, keys in (
            ("the same pointer", ("same_pointer",)),
            ("the right values, a copy's too", ("right", "copy")),
            ("alive after its maker has let go of it", ("outlives",)),
        ):
            good = [name for name, one in own.items() if all(one.get(key) is True for key in keys)]
            check(f"30 pairs: {what}", len(good) == 30, _of(good, own))
        buffers = {name: one for name, one in pairs.items() if name not in own}
        good = [name for name, one in buffers.items() if one.get("same_pointer") and one.get("right")]
        check("buffers of RMM and cuda.core into all six: the same pointer", len(good) == 12, _of(good, buffers))
    matrix = s.get("dtypes", {}).get("dtypes", {})
    if matrix:
        _dtype_checks(matrix, TAKES, check)
    edges = {name: one for name, one in s.items() if name.startswith("edges from ") and "cases" in one}
    if edges:
        cases = [{**case, "from": name.split()[-1]} for name, one in edges.items() for case in one["cases"]]
        deaths = [f"{name}: {death['case']}" for name, one in edges.items() for death in one["deaths"]]
        check(
            "odd arrays: no process dies",
            not deaths and len(edges) == 8 and all(one["open"] >= 0 for one in edges.values()),
            f"{len(cases)} hand-overs from {len(edges)} sources, {len(deaths)} deaths {deaths or ''}".rstrip(),
        )
        for what, key, wanted in (
            ("the documented answer", "outcome", "expected"),
            ("equal values with copy=True", "copy", "expected_copy"),
        ):
            wrong = [f"{c['from']} {c['case']} > {c['target']}: {c[key]}" for c in cases if c[key] != c[wanted]]
            check(
                f"odd arrays: {what}",
                len(cases) >= 300 and not wrong,
                f"{len(cases) - len(wrong)} of {len(cases)} {'; '.join(wrong[:6])}".rstrip(),
            )
    for name in ("misaligned into TensorFlow", "reversed into PyTorch"):
        control = s.get(f"control: {name}")
        if control is not None:
            check(f"by hand, {name}: the process dies", control["returncode"] < 0, f"rc {control['returncode']}")
    _order_checks(s, named("order from ", "order"), check)
    speed = s.get("speed", {})
    if "speed" in speed:
        _speed_checks(speed, check)
    lent = s.get("lent", {}).get("lent", {})
    if lent:
        good = [
            name for name, one in lent.items()
            if one["lent"] == one["nbytes"] and not one["before"] and not one["after"] and one["nvml_growth"] == 0
            and one.get("sum_minus_total") == 0 and one["nvml"] > 0
        ]  # fmt: skip
        check("lent: in the ledger while a view lives, charged once", len(good) == 30, _of(good, lent))
    leak = s.get("leak", {})
    if "nvml_after" in leak:
        growth = leak["nvml_after"] - leak["nvml_before"]
        check(
            "10,000 hand-overs: +- 0 bytes",
            leak["hand_overs"] >= 10_000 and leak["nvml_before"] > 0 and growth == 0 and leak["open"] == 0,
            f"{growth:+d} bytes in {leak['hand_overs']:,}, {leak['open']} not ended, "
            f"host memory {leak['rss_growth_kib'] / 1024:+.1f} MiB",
        )
    killed = s.get("killed", {})
    if "nvml_after" in killed:
        growth = killed["nvml_after"] - killed["nvml_before"]
        held = killed["nvml_exported"] - killed["nvml_before"]
        good = growth == 0 and held >= killed["bytes"] and killed["attached"] == [1, 0]
        good = good and killed["child_returncode"] == -9 and killed["child"]["last"] == killed["last"]
        check(
            "a process that attached is killed with -9: the memory goes back",
            good,
            f"{held / MIB:,.0f} MiB exported, {growth:+d} bytes after",
        )
    routes = s.get("routes", {}).get("routes", {})
    if routes:
        ms = {name: route.get("ms", route.get("error")) for name, route in routes.items()}
        check("routes: each timed", all(isinstance(one, (int, float)) for one in ms.values()) and len(ms) >= 5, str(ms))
    peers = s.get("peers", {})
    if "peers" in peers:
        _peer_checks(peers, six, check)
    left = {name: one["open"] for name, one in s.items() if one.get("open")}
    check("nothing stays lent", not left, str(left or "in no scenario"))
    return found


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


def _order_checks(s: dict[str, Any], order: dict[str, Any], check: Any) -> None:
    if order:
        good = [name for name, one in order.items() if one["rounds"] >= 1000 and one["stale"] == 0]
        most = sum(one["stale"] for one in order.values())
        few = min(one["rounds"] for one in order.values())
        check(
            "30 pairs: none stale in 1,000 rounds while the producer's kernel runs",
            len(good) == 30,
            f"{_of(good, order)}, {most} stale, at least {few} rounds",
        )
        told = {name: one for name, one in order.items() if not name.startswith("tensorflow")}
        ran = [name for name, one in told.items() if one["running_before"] >= 0.9 * one["rounds"]]
        check(
            "30 pairs: the kernel was still running in nine of ten rounds (TensorFlow does not tell)",
            len(ran) == 25,
            _of(ran, told),
        )
    ways = s.get("order without memguard", {}).get("ways", {})
    if ways:
        stale = {name: f"{one['stale']} of {one['rounds']}" for name, one in ways.items()}
        check(
            "by hand without order: stale at least once",
            any(one["stale"] for one in ways.values()),
            "; ".join(f"{name}: {figure}" for name, figure in stale.items()),
        )
    dropped = s.get("dropped", {})
    if "dropped" in dropped:
        wrong = {name: f"{one['wrong']} wrong of {one['rounds']}" for name, one in dropped["dropped"].items()}
        good = all(one["rounds"] >= 100 and one["wrong"] == 0 for one in dropped["dropped"].values())
        check("a view dropped while it is still read: right values", good and len(wrong) >= 5, str(wrong))
        without = {name: f"{one['wrong']} wrong of {one['rounds']}" for name, one in dropped["without"].items()}
        check(
            "by hand, dropped while it is still read: wrong at least once",
            any(one["wrong"] for one in dropped["without"].values()),
            str(without),
        )


def _speed_checks(speed: dict[str, Any], check: Any) -> None:
    extra = {name: one["extra_us"] for name, one in speed["speed"].items()}
    good = [name for name, figure in extra.items() if figure is not None and figure <= 50]
    known = [(figure, name) for name, figure in extra.items() if figure is not None]
    worst = max(known, default=(0, "none"))
    size = speed["bytes"] / GIB
    check(
        f"{size:.0f} GiB, idle: at most 50 us over the best route by hand, 30 pairs",
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


QUIET_SECONDS = 120


def moment_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `moment.py`: every field of every report right, advice that helps where it promises to, no alarm."""
    from _moment import ARRANGED, QUIET, verdict

    found: dict[str, tuple[bool, str]] = {}
    for name in ARRANGED:
        one = result["programs"].get(name)
        if one is None:
            found[f"{name}: reason, requester, bytes, holder and advice"] = (False, "not run")
            continue
        wrong = list(verdict(one))
        right = "; ".join(f"{field} {figure.partition(' (')[0]}" for field, (_, figure) in one["fields"].items())
        found[f"{name}: reason, requester, bytes, holder and advice"] = (
            not wrong and len(one["fields"]) >= 6, "; ".join(wrong) or right
        )  # fmt: skip
        followed = one["followed"]
        # Each program was arranged so that some advice can be followed: none is a wording that was not understood.
        found[f"{name}: followed advice helps"] = (
            (bool(followed["helped"]), f"{followed['advice'][:100]}: {followed['figure']}")
            if followed["tried"]
            else (False, f"nothing could be followed: {'; '.join(followed['skipped'])}")
        )
    for name in QUIET:
        one = result["quiet"].get(name)
        if one is None or "alarms" not in one:
            found[f"{name}: two minutes, no alarm"] = (False, "not run" if one is None else one.get("failed", "failed"))
            continue
        ran_for = min(one["asked_seconds"], one["seconds"])
        long_enough = one["done"] and one["returncode"] == 0 and ran_for >= QUIET_SECONDS
        said = " | ".join(one["alarms"][:3])
        figure = f"{ran_for:.0f} s, rc {one['returncode']}, {len(one['alarms'])} alarms {said}".rstrip()
        found[f"{name}: two minutes, no alarm"] = (long_enough and not one["alarms"] and not one["report"], figure)
    return found


def their_tests_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `their_tests.py`: every test run both ways, and no difference without a reason."""
    found: dict[str, tuple[bool, str]] = {}
    for name in ("pycuda", "numba"):
        suite = result["suites"].get(name)
        if suite is None:
            found[f"{name}: its own tests"] = (False, "not run")
            continue
        left = [*suite["not_run"], *suite["not_collected"]]
        some = ", ".join(left[:3])
        found[f"{name}: every test of its own run both ways"] = (
            suite["run"] > 0 and not left and not result["simulated"],
            f"{suite['run']} of {suite['collected']}" + (f", left {len(left)}: {some} ..." if left else ""),
        )
        found[f"{name}: under memguard a budget is active"] = (
            suite["run"] > 0 and not suite["inactive"],
            f"{len(suite['inactive'])} processes without one {', '.join(suite['inactive'][:3])}".rstrip(),
        )
        unexplained = [one for one in suite["differences"] if one["reason"] is None]
        reasons = ", ".join(f"{one['test']}: {one['reason']}" for one in suite["differences"] if one["reason"])
        found[f"{name}: no difference without a reason"] = (
            suite["run"] > 0 and not unexplained,
            f"{len(unexplained)} of {len(suite['differences'])} differences have none: "
            f"{', '.join(one['test'] for one in unexplained[:6]) or '-'}; {reasons or 'none has one'}",
        )
    return found
