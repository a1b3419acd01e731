"""The checks that each benchmark has to tell, written down: by scenario, in the order of its result.

`_run.judged` holds a result to its list. A check that is not told has failed, and so has one that is not in the list. A
check whose bar changes gets a new name, so that an older result lacks it and does not pass it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from _ways import SHARES, WAYS

SIX = ("tensorflow", "torch", "jax", "cupy", "pycuda", "numba")
COUNTED = ("torch", "cupy", "pycuda", "numba")
"""The frameworks that give back what is freed: the driver's figure without them says what they held."""
SEEN_BY_CUPTI = tuple(name for name in SIX if name != "jax")
"""The frameworks of which CUPTI's records have every allocation."""
POOL = "jax: held grows as the driver's figure does, within 2 MiB"
REPORTS = ("torch", "torch async", "tensorflow", "jax", "cupy", "cupy async", "pycuda", "numba")
PROGRAMS = (
    "compiled", "keras_fit", "tf1_session", "jax_jit", "jax_donated", "generate", "data_loader", "graph_capture",
    "comprehension", "forward", "backward", "optimizer_step", "caught", "in_thread", "forked_worker", "cupy_fft",
    "numba_kernel", "pycuda_expression", "sibling_cache", "other_process", "full_card_cublas",
)  # fmt: skip
QUIET = ("quiet_images", "quiet_generate", "quiet_data_set", "quiet_jax")

RAW = "memory that no framework took is unaccounted within 2 MiB, and gone with its free"

LITTLE = "at most 64 MiB unaccounted in every ledger, TensorFlow's unseen pool in it"

ALONE = "held is what the process's figure of NVML grew by"


def of_refusals(name: str) -> str:
    return f"{name}: no refusal where the driver would have stayed within the cap, by trying"


def of_refusals_beside(name: str) -> str:
    return f"{name}: no refusal where held would have stayed within the cap, beside others' slabs, by trying"


def of_emptied(name: str) -> str:
    return f"{name}: held agrees with what the driver has back when it is emptied"


def of_report(kind: str, where: str) -> tuple[str, ...]:
    return tuple(
        f"{kind}, {where}: {what}"
        for what in (
            "names the requester",
            "size within 1 MiB",
            "names the largest holder and its bytes",
            "reclaimable is what a trim gives back to the driver",
            "what lay idle in the sibling's cache is said and comes back",
            "says why",
            *(["names the other process and its bytes"] if where == "card full" else []),
        )
    )


TICK = (
    *(
        f"tick at work: at most {most} us of CPU ({part}), all six live"
        for part, most in (("median", 120), ("p90", 180))
    ),
    "tick at work: samples were written, and events called back",
)

MAIN_JOB: dict[str, tuple[str, ...]] = {
    "together": (
        "sum of caps >= 37 GiB",
        *(f"{name}: {what}" for name in ("tensorflow", "torch", "pycuda") for what in (
            "held <= cap", "own native type",
        )),
        "torch: no refusal where its segment would fit",
        "tensorflow: no refusal where it would fit",
        "tensorflow: pool <= cap",
        "process <= 40 GiB at every sample, at most 100 ms apart",
        "together: freed and asked again at the caps",
        "together: overhead within the reserve",
        *(f"together, {of_emptied(name)}" for name in ("torch", "pycuda")),
        f"together: {RAW}",
        f"together: {LITTLE}",
        "together: rows add up to the total (plain sanity: unaccounted is the remainder)",
    ),
    "torch_and_pycuda": (
        "torch + PyCUDA: rows add up to the total (plain sanity: unaccounted is the remainder)",
        "torch + PyCUDA: unaccounted <= 64 MiB",
    ),
    **{
        name: tuple(
            f"{name}: {what}" for what in ("held <= cap", ALONE, "own native type", "no refusal where it would fit")
        )
        for name in ("torch_expandable", "torch_async")
    },
    "refusals of pycuda": (of_refusals("pycuda"),),
    "order_control": ("TensorFlow before torch, control dies by signal 8",),
    **{
        name: (f"{name}: the products of both are right, 132 multiprocessors",)
        for name in ("order_cured", "order_cured_tensorflow_first")
    },
    "without_memguard": ("without memguard: TensorFlow takes the card, torch and PyCUDA die",),
    "tensorflow-undone": ("tensorflow undone before its first operation",),
    **{
        f"{name}-{when}": (f"{name} {when}: as much as the cap, and not more",)
        for name in ("torch", "tensorflow", "pycuda") for when in ("later", "imported", "live")
    },
    "mixed_workload": ("the example of the README runs to its end",),
}  # fmt: skip

ALL_FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "together": (
        "six: sum of caps >= 36 GiB",
        *(f"six: {name} {what}" for name in SIX for what in ("held <= cap", "refuses with its own error")),
        "six: jax no refusal where its own figures have room",
        "six: tensorflow no refusal where its own log has room",
        "six: tensorflow pool <= cap, by its log",
        "six: process <= 40 GiB at every sample, at most 100 ms apart",
        *(f"six, {of_emptied(name)}" for name in COUNTED),
        f"six: {RAW}",
        f"six: {LITTLE}",
        "six: rows add up to the total (plain sanity: unaccounted is the remainder)",
        "six: overhead within the reserve",
    ),
    "counted": tuple(
        f"{name}: {what}"
        for name in COUNTED for what in (
            "held grows and shrinks as the driver's figure does, within 2 MiB for large arrays",
            "held grows and shrinks as the driver's figure does, within 5 % for small ones",
            "in use is what its live arrays were asked for with, and what its rounding adds",
        )
    ),
    "counted by CUPTI": (*(f"{name}: held is what CUPTI saw its library take" for name in SEEN_BY_CUPTI), POOL),
    **{f"refusals of {name}": (of_refusals(name),) for name in COUNTED},
    **{f"refusals of {name} beside others": (of_refusals_beside(name),) for name in COUNTED},
    "*-*": ("30 import orders alive and capped, at most 64 MiB unaccounted, overhead within the reserve",),
    **{
        f"{name}, {when}": (f"{name}, {when}: as much as the cap, and not more",)
        for name in ("cupy", "jax", "numba") for when in ("later", "imported", "live")
    },
    "loop": (
        "loop: five minutes",
        "loop: drift of unaccounted <= 64 MiB",
        "loop: drift of overhead and unaccounted together <= 64 MiB",
        "loop: each refused",
        "loop: own errors only",
        "loop: no refusal of JAX where its own figures have room",
        "loop: held <= cap",
        "loop: rows add up to the total (plain sanity: unaccounted is the remainder)",
        "loop: process <= 40 GiB at every sample, at most 100 ms apart",
    ),
    "simulated_hour": ("simulated hour",),
}  # fmt: skip

WATCH: dict[str, tuple[str, ...]] = {
    **{
        f"{kind}, {where}": of_report(kind, where)
        for where in ("own cap", "card full") for kind in REPORTS
        if (kind, where) != ("cupy async", "own cap")  # it has no cap of its own
    },
    "leak": ("leak: announced >= 5 s before the OOM, for about when it came",),
    "sawtooth": ("sawtooth: ten minutes, no alarm",),
    "tick": TICK,
    "small ops": ("small ops: ratio with the monitor at 10 Hz, upper bound <= 1.02",),
}  # fmt: skip

DOCTOR: dict[str, tuple[str, ...]] = {
    "as shipped": (
        "as the machine ships: nothing above info",
        "as the machine ships: what is true of it, and nothing else",
    ),
    "all six": (
        "with the TensorFlow for CUDA 12: what is true of it, and nothing else",
        "each probe's time shown",
    ),
    **{
        name: (f"{name}: found and named, and nothing else",)
        for name in (
            "no such GPU", "both XLA fractions", "async allocator with a limit", "second context",
            "two copies of a library", "a full card",
        )
    },
    "TensorFlow before PyTorch": (
        "TensorFlow before PyTorch: found and named, and nothing else",
        "TensorFlow before PyTorch: PyTorch dies, and is said to",
    ),
    "all six, timed": ("six frameworks <= 20 s",),
}  # fmt: skip

EXCHANGE: dict[str, tuple[str, ...]] = {
    "pairs": (
        "30 pairs: the same pointer",
        "30 pairs: the right values, a copy's too",
        "30 pairs: alive after its maker has let go of it",
        "buffers of RMM and cuda.core into all six: the same pointer",
    ),
    "dtypes": ("dtypes: shared or refused as documented, all 30 pairs",),
    "edges from *": (
        "odd arrays: no process dies",
        "odd arrays: the documented answer",
        "odd arrays: equal values with copy=True",
    ),
    "control: misaligned into TensorFlow": ("by hand, misaligned into TensorFlow: the process dies",),
    "control: reversed into PyTorch": ("by hand, reversed into PyTorch: the process dies",),
    "order from *": ("30 pairs: none stale in 1,000 rounds in which the producer's kernel was seen running",),
    "order without memguard": ("by hand without order: stale at least once",),
    "dropped": (
        "a view dropped while it is still read: right values",
        "by hand, dropped while it is still read: wrong for each lender",
    ),
    "speed": (
        "1 GiB, idle: at most 50 us over the best route by hand, 30 pairs",
        "against the host route, in the same run",
    ),
    "lent": ("lent: in the ledger while a view lives, charged once",),
    "leak": ("10,000 hand-overs: +- 0 bytes of the GPU, at most 16 MiB of the host",),
    "killed": ("a process that attached is killed with -9: the memory goes back",),
    "routes": ("routes: each timed",),
}
EXCHANGE_PEERS: dict[str, tuple[str, ...]] = {
    "peers": (
        "two GPUs: copied from one to the other, all six",
        "two GPUs: not shared across them",
        "two GPUs: the route that is said is the one that the rate shows, all six",
    ),
}


def of_exchange(scenarios: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The list of a run of `exchange.py`: two GPUs have one of their own, and another kind of card one of speed."""
    if set(scenarios) == {"speed"}:
        return {"speed": EXCHANGE["speed"]}
    one = {} if set(scenarios) == {"peers"} else EXCHANGE
    return {**one, **(EXCHANGE_PEERS if "peers" in scenarios else {}), "nothing stays lent": ("nothing stays lent",)}


MOMENT: dict[str, tuple[str, ...]] = {
    **{
        name: (f"{name}: reason, requester, bytes, holder and advice", f"{name}: followed advice helps")
        for name in PROGRAMS
    },
    **{name: (f"{name}: two minutes, no alarm",) for name in QUIET},
}

THEIR_TESTS: dict[str, tuple[str, ...]] = {
    name: (
        f"{name}: every test of its own run both ways",
        f"{name}: under memguard a budget is active",
        f"{name}: no difference without a reason",
    )
    for name in ("pycuda", "numba")
}

DDP: dict[str, tuple[str, ...]] = {
    f"rank {rank}": tuple(
        f"rank {rank}: {what}"
        for what in (
            "rows add up to the total on both GPUs (plain sanity: unaccounted is the remainder)",
            "|unaccounted| <= 64 MiB",
            "held agrees with what the driver has back when it is emptied",
            "NCCL's memory is in the reserve",
            "process <= limit",
            "held <= cap, own error",
            "trains, weights equal on both",
        )
    )
    for rank in range(2)
}

RANKS: dict[str, tuple[str, ...]] = {
    "two": (
        "two ranks over NCCL: each has the whole budget of its own GPU",
        "two ranks over NCCL: each stops at its cap by its own error",
        "two ranks over NCCL: each GPU's rank stays below its limit, by NVML in a process that is no rank",
        "two ranks over NCCL: the table of every rank agrees with that reading of NVML",
        "two ranks over NCCL: NCCL's memory is in the reserve, without a word of it in the budget",
    ),
    "four": (
        "four ranks on two GPUs: each has half of the budget of its GPU",
        "four ranks on two GPUs: each stops at its cap by its own error",
        "four ranks on two GPUs: those of a GPU stay below its limit together, by NVML in a process that is no rank",
        "four ranks on two GPUs: the table of every rank agrees with that reading of NVML",
        "four ranks on two GPUs: control: without ranks: auto each gets more than its part",
    ),
}

LIGHT: dict[str, tuple[str, ...]] = {
    "import": ("import memguard <= 1.5 x import pydantic, yaml",),
    "init": (
        "init, no framework imported, its dependencies loaded <= 50 ms",
        "init in a fresh interpreter, the imports of pydantic, PyYAML and nvidia-ml-py included <= 50 ms",
    ),
    "plan": ("a plan of 6 frameworks x 8 GPUs <= 1 ms",),
}

STARTUP: dict[str, tuple[str, ...]] = {
    "start": ("a start without MEMGUARD_CONFIG <= 1 ms longer, upper 95 % bound of the median difference",),
    "alone": ("the file alone <= 1 ms, 95 % of the readings",),
}

REPLAY: dict[str, tuple[str, ...]] = {
    "long": ("replay of 1,000,000 samples <= 60 s",),
    "both": (
        "memory independent of length, by the process's own peak",
        "every sample is replayed",
    ),
}

PEERS: dict[str, tuple[str, ...]] = {
    "run": ("a whole run on a GPU",),
    **{
        library: (
            f"{library}: every way measured",
            f"{library}: no process under memguard dies at its end",
            f"{library}: filled to its part of the cap",
            f"{library}: two processes of one way are alike within 10%",
        )
        for library in WAYS
    },
    **{
        f"{share:.1%}": (
            f"PyCUDA's mem_alloc at {share:.1%}: <= 2.5 x its own pool, or 2 us",
            f"PyCUDA's DeviceMemoryPool at {share:.1%}: <= 2.5 x its own pool, or 2 us",
            f"Numba at {share:.1%}: <= RMM's pool where its pool serves",
            f"CuPy at {share:.1%}: <= 1.10 of plain",
            f"torch at {share:.1%}: within its control",
        )
        for share in SHARES
    },
}

TRAINING: dict[str, tuple[str, ...]] = {
    name: (
        f"{name}: 95 % bound of 100 interleaved pairs <= 1.005 beyond the control",
        f"{name}: under a budget, with samples at 10 Hz, and in the control without",
    )
    for name in ("ResNet-50", "GPT")
}

READINGS: dict[str, tuple[str, ...]] = {
    "readings": (
        *(
            f"{name}: at most {most} us above its bare probes"
            for name, most in (("ledger", 40), ("sample", 15), ("require", 10), ("workload", 20))
        ),
        "the next reading shows every array",
    ),
    "ticking": TICK,
}

INIT: dict[str, tuple[str, ...]] = {
    "init": ("init of six frameworks, its dependencies loaded, nvmlInit apart <= 50 ms, 95 % of the readings",),
    "imported": ("init of six that are imported, nvmlInit apart <= 50 ms, 95 % of the readings",),
    "fresh": (
        "init in a fresh interpreter <= 60 ms more than the imports of pydantic, PyYAML and nvidia-ml-py, "
        "nvmlInit apart, upper 95 % bound of the median difference",
    ),
}

ELASTIC_PAIRS = tuple(
    f"{giver} > {taker}"
    for giver in ("torch", "cupy", "numba", "pycuda")
    for taker in ("cupy", "pycuda", "numba")
    if giver != taker
)
"""Whose idle cache goes to whom. The takers' allocators are memguard's."""
MIX = ("torch", "cupy", "pycuda", "numba")
MOVES_RIGHT = "moves: the values of every array are right"
MOVES_STAY = "moves: the process holds no more after a move than before, and never more than its limit, by NVML"
MOVES_BESIDE = "moves: from pieces of 2 MiB, and with the giver trimmed by hand, beside them"
BURST = (
    "burst: CuPy has its min at once in 200 alternations, PyTorch's bytes live",
    "burst: CuPy has its max within one tick in 200 alternations, PyTorch's bytes idle",
    "burst: the values of both are right",
    "burst: within the limit at every sample of NVML",
)
BURST_FIXED = "burst, control: with fixed shares CuPy has its share, and never the max"
POOL_PEAKS = (
    "pool: five peaks of 8 GiB in turn take at most 8.4 GiB and the overhead, by NVML",
    "pool: peaks of torch, CuPy, PyCUDA and Numba, which draw from it, take at most 8.4 GiB and the overhead, by NVML",
    "pool: the values of every array are right",
)
POOLED = ("torch", "cupy", "pycuda", "numba")
"""Those that draw from the shared pool: docs/pool.md. JAX draws from the default pool."""
POOL_APART = "pool, control: with caches apart they take about 40 GiB"
ELASTIC_SEEDS = tuple(range(1, 21))
"""The schedules that are played on a GPU."""
ELASTIC_CONTROLS = (1, 2)
"""Those that are played with fixed shares too."""
SCHEDULES = (
    "schedules: no refusal of 20 schedules was avoidable",
    "schedules: every min is there at each step",
    "schedules: the process is within its limit at every sample of NVML",
    "schedules: the values of every array are right",
)
SCHEDULES_FIXED = "schedules, control: with fixed shares refusals were avoidable"


def of_reclaim(name: str) -> tuple[str, str, str]:
    through = "through memguard.retry" if name in ("torch", "tensorflow", "jax") else "within its allocation"
    return (
        f"{name}: 8 GiB of a card with 2 GiB free, {through}",
        f"{name}: what was missing came back, by NVML",
        f"{name}: the values of its 8 GiB are right",
    )


def of_reclaim_plain(name: str) -> tuple[str]:
    return (f"{name}, control: without memguard the same request fails",)


def of_move(pair: str) -> str:
    return f"{pair}: 8 GiB from a cache of 64 MiB blocks, p99 of 100 moves <= 100 ms"


def of_mix(library: str) -> str:
    return f"{library}: a mix of allocations under both strategies, plain and on another pool"


def of_mix_alike(library: str) -> str:
    return f"{library}: two processes of one way are alike within 10%"


ELASTIC: dict[str, tuple[str, ...]] = {
    **{f"reclaim {name}": of_reclaim(name) for name in SIX},
    **{f"reclaim {name}, plain": of_reclaim_plain(name) for name in SIX},
    "moves": (*(of_move(pair) for pair in ELASTIC_PAIRS), MOVES_RIGHT, MOVES_STAY, MOVES_BESIDE),
    "burst": BURST,
    "burst, fixed shares": (BURST_FIXED,),
    "pool": POOL_PEAKS,
    "pool, caps": (POOL_APART,),
    "mix": tuple(name for library in MIX for name in (of_mix(library), of_mix_alike(library))),
    "schedule *": SCHEDULES,
    "fixed shares, schedule *": (SCHEDULES_FIXED,),
}

SUSPEND_STEPS: dict[str, tuple[str, ...]] = {
    "off": ("state", "lock", "settle", "checkpoint"),
    "on": ("state", "room", "restore", "unlock"),
}
"""Of a process that leaves its GPU, and that comes back: at each the helper is killed, and Ctrl-C pressed."""
BREAKS = ("helper killed", "SIGINT", "controller killed")
STOPPED = "a stopped process"
REFUSED: dict[str, tuple[str, ...]] = {
    "managed memory of cupy": ("managed-memory",),
    "managed memory of numba": ("managed-memory",),
    "torch gave a tensor": ("cuda-ipc",),
    "torch opened a tensor": ("cuda-ipc",),
    "memguard.exchange gave an array": ("cuda-ipc",),
    "a capture": ("capture",),
    "torch.profiler": ("profiler",),
    "NCCL, one rank": ("nccl",),
    "a child with a context": ("children",),
    "too little host memory": ("host-memory",),
    STOPPED: ("stopped",),
}
"""What is provoked, and the code of the reason that has to be among those given."""
OUTSIDE = (
    "outside: memguard ps lists a process while it runs and while it is suspended",
    "outside: memguard suspend and resume take it off and bring it back, values right",
    "outside: a process that does not allow it is refused, and taken with --unsafe",
)
PEAK = ("tensorflow after a peak of 60 GiB: 0 bytes while suspended",)
TURNS = (
    "turns: two processes of 44 GiB take turns on 80 GB",
    "turns: both lie in host memory for a moment, and come back with both ends of each GiB as they were",
)
NO_ROOM = (
    "no room: it waits, says who holds the card, and stays suspended and whole",
    "no room: it comes back when there is room, values right",
)
STRANGER = ("stranger: 20 rounds beside a process that grabs memory at random: how many were lost, and why each",)
NOTEBOOK = (
    "notebook: an idle kernel leaves the card, and another process has the whole of it",
    "notebook: the next cell brings it back and computes the right value",
    "notebook: a refused cell does not run, and the kernel stays whole",
)
CONTROL = ("control: without gates a synchronize of another thread ends the process",)


def of_rounds(who: str) -> tuple[str, ...]:
    return (
        f"{who}: the values are the same after five rounds and after twenty",
        f"{who}: NVML lists nothing of it while it is suspended",
        f"{who}: after 20 rounds no more is taken of the card and of host memory than after one",
        f"{who}: ledger and timeline say that it was suspended",
    )


def of_calls(name: str) -> tuple[str, ...]:
    return (
        f"{name}: every kind of call of another thread waits or is refused, 30 rounds",
        f"{name}: no such call ends the process, and the values are right",
    )


def of_break(what: str, way: str) -> tuple[str, ...]:
    return (f"{what}, {way}: the process is back each time, values right",)


def of_refused(what: str) -> tuple[str, ...]:
    return (f"refused: {what}",)


def of_seconds(name: str) -> tuple[str, ...]:
    return (f"seconds: {name} is off the card at each size, twice, and back with both ends of each GiB as they were",)


def of_window(which: str) -> tuple[str, ...]:
    return (f"window, {which}: measured, and told what a stranger can do in it",)


SUSPEND: dict[str, tuple[str, ...]] = {
    **{f"rounds {name}": of_rounds(name) for name in SIX},
    "rounds six": of_rounds("all six"),
    **{f"calls {name}": of_calls(name) for name in SIX},
    "control": CONTROL,
    **{f"{what}, {way}": of_break(what, way) for what in BREAKS for way in SUSPEND_STEPS},
    **{f"refused {what}": of_refused(what) for what in REFUSED},
    "outside": OUTSIDE,
    "peak": PEAK,
    **{f"seconds {name}": of_seconds(name) for name in SIX},
    "turns": TURNS,
    "no room": NO_ROOM,
    "stranger": STRANGER,
    **{f"window, context {which}": of_window(f"context {which}") for which in ("stays", "goes")},
    "notebook": NOTEBOOK,
}

SUGGEST_PROGRAMS: dict[str, tuple[str, ...]] = {
    "torch_training": ("torch",),
    "jax_cupy": ("jax", "cupy"),
    "tensorflow_pycuda": ("tensorflow", "pycuda"),
}
"""The programs of `suggest.py`, with their frameworks."""


def of_suggested(name: str) -> tuple[str, ...]:
    return tuple(
        f"{name}: {what}"
        for what in (
            "the smallest headroom that passes is measured",
            "the default headroom passes in 10 of 10 runs",
            "the default wastes at most 20 % over the smallest that passes",
            "the timeline has the allocators' own peaks",
            "a budget from a run without one passes",
        )
    )


SUGGEST: dict[str, tuple[str, ...]] = {
    **{name: of_suggested(name) for name in SUGGEST_PROGRAMS},
    "recording": (
        "recording: 20 s at 10 Hz of PyTorch, JAX and CuPy",
        "recording: caught out-of-memory errors of PyTorch and CuPy, workloads, peaks",
    ),
}

TOP: dict[str, tuple[str, ...]] = {
    **{
        name: (f"{what}: at most 2 % of a core at 2 Hz, in both halves", f"{what}: drawn at least 1.5 times a second")
        for name, what in (
            ("follows", "following a timeline of six frameworks"), ("attached", "watching this machine and a process"),
        )
    },
    "control": ("an almost empty screen of textual beside them: measured, and drawn as often",),
}  # fmt: skip

LEASES: dict[str, tuple[str, ...]] = {
    "together": (
        "four processes with leases of 34 GiB fill their caps on one card, together",
        "each has at most 34 GiB by NVML, its context included",
        "every value is right while all four are full",
        "a fifth waits, with nothing on the card",
        "it has its lease within 1 s of the end of one",
        "it fills its caps, and every value is right afterwards",
    ),
    "control": ("without leases at least one of five dies",),
    "turns": (
        "two jobs that fill 44 GiB take turns on 80 GiB, three times each",
        "each is served within 150 s of asking",
        "every bit is right after each turn",
        "by NVML they are never on the card at once, and each has at most 44 GiB, its context included",
        "at each look `memguard leases` has the right sum, and never both",
        "between two turns both lie in host memory for a moment",
        "the first comes back by itself when the second ends, and nothing is left at last",
    ),
    "without suspend-idle": ("without suspend-idle the second is refused when its time is up, and nobody leaves",),
}

BY_COMMAND: dict[str, dict[str, tuple[str, ...]]] = {
    "main_job": MAIN_JOB,
    "all_frameworks": ALL_FRAMEWORKS,
    "watch": WATCH,
    "doctor": DOCTOR,
    "exchange": of_exchange(EXCHANGE),
    "moment": MOMENT,
    "their_tests": THEIR_TESTS,
    "ddp": DDP,
    "ranks": RANKS,
    "light": LIGHT,
    "startup": STARTUP,
    "replay": REPLAY,
    "peers": PEERS,
    "training": TRAINING,
    "readings": READINGS,
    "init": INIT,
    "elastic": ELASTIC,
    "suspend": SUSPEND,
    "suggest": SUGGEST,
    "top": TOP,
    "leases": LEASES,
}
"""By the name of the program in `about.command` of a result."""


FILES: dict[str, str | None] = {
    "h200-main-job.json": "main_job",
    "h200-all-frameworks.json": "all_frameworks",
    "h200-watch.json": "watch",
    "h200-readings.json": "readings",
    "h200-moment.json": "moment",
    "h200-exchange.json": "exchange",
    "h200-x2-exchange.json": "exchange",
    "h200-doctor.json": "doctor",
    "h200-their-tests.json": "their_tests",
    "h200-gpu-tests.json": None,
    "h200-x2-gpu-tests.json": None,
    "h200-light.json": "light",
    "h200-peers.json": "peers",
    "h200-training.json": "training",
    "h200-init.json": "init",
    "h200-elastic.json": "elastic",
    "h200-suspend.json": "suspend",
    "h200-suggest.json": "suggest",
    "h200-top.json": "top",
    "h200-leases.json": "leases",
    "h200-x2-ddp.json": "ddp",
    "h200-x2-ranks.json": "ranks",
    "replay.json": "replay",
    "startup.json": "startup",
}
"""The results that have to be there, each with the program that makes it; None for `tests/gpu`. If one is missing, its
checks have not passed."""


def names(listed: dict[str, tuple[str, ...]]) -> list[str]:
    return [name for each in listed.values() for name in each]


def list_of(result: dict[str, Any]) -> list[str]:
    """The names of the checks that a result has to have; none if its benchmark has no list, as `tests/gpu`."""
    program = result["about"]["command"].partition("benchmarks/")[2].partition(".py")[0]
    if program == "exchange":
        about = result["about"]
        whole = about.get("gpus") == 1 and "H200" in (about["gpu"] or "")
        return names(of_exchange(EXCHANGE if whole else result["scenarios"]))
    return names(BY_COMMAND.get(program, {}))


def lacking(result: dict[str, Any]) -> list[str]:
    """The checks of today's list that a result does not have: it was measured before they were written, or in part."""
    return [name for name in list_of(result) if name not in result.get("checks", {})]


def not_measured(there: Collection[str]) -> dict[str, list[str]]:
    """The results that are not there, each with the names of its checks."""
    found = {}
    for file, program in FILES.items():
        if file not in there:
            two = "x2-exchange" in file
            found[file] = names(of_exchange(EXCHANGE_PEERS) if two else BY_COMMAND.get(program or "", {}))
    return found
