"""The real TensorFlow without a GPU. Where one is needed, its own list of physical devices gets one entry more.

Every call on that entry is TensorFlow's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]

SETUP = """
import tensorflow as tf
from memguard._frameworks.tensorflow.adapter import TensorFlow
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
host = Host()
framework, uuid, device = TensorFlow(host), host.uuids[0], host.gpus[0]
def limits(gpu): return [c.memory_limit for c in tf.config.get_logical_device_configuration(gpu) or []]
def own(gpu, *mib): tf.config.set_logical_device_configuration(
    gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=m) for m in mib])
"""
ONE = SETUP + "(gpu,) = gpus()\n"
TWO = SETUP.replace("Host()", 'Host("h200", "h200")') + "first, second = gpus(2)\n"


def test_looking_does_not_make_it_live_and_an_operation_does(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        SETUP
        + """
states = [framework.state().value]
result["nothing"] = [framework.usage(device), framework.trim(device), framework.record()]
tf.config.list_physical_devices()
states.append(framework.state().value)
tf.zeros((2,))
states.append(framework.state().value)
result["states"], result["usage"] = states, framework.usage(device)
result["oom"] = tf.errors.ResourceExhaustedError.__name__
"""
    )
    assert found["states"] == ["imported", "imported", "live"]
    assert found["nothing"] == [None, None, None] and found["oom"] == "ResourceExhaustedError"
    assert found["usage"] is None, "live, but it has no GPU to hold memory of"


def test_imported_under_the_hook(alone: Run) -> None:
    found = alone(
        """
        import importlib.machinery
        from memguard._frameworks.import_hook import ImportHook
        from memguard._frameworks.tensorflow.adapter import TensorFlow
        framework = TensorFlow(Host())
        result["before"] = [framework.state().value, "tensorflow" in sys.modules]
        hook, seen = ImportHook(), []
        look = lambda: [framework.state().value, hasattr(sys.modules["tensorflow"], "config")]
        hook.watch(framework.hook, lambda: seen.append(look()))
        import tensorflow as tf
        result["seen"], result["gone"] = seen, hook not in sys.meta_path
        result["loader"] = type(tf.__spec__.loader) is importlib.machinery.SourceFileLoader
        result["sum"] = float(tf.reduce_sum(tf.ones((3,))))
        """
    )
    assert found["before"] == ["importable", False]
    assert found["seen"] == [["imported", True]] and found["gone"] and found["loader"] and found["sum"] == 3.0


def test_without_a_gpu_its_share_stays_free_and_it_says_why(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        SETUP
        + """
before = dict(os.environ)
applied = apply_caps(framework, {uuid: 4 * GIB}, {"growth": True})
applied.undo()
result.update(enforcement=applied.enforcement.value, notes=applied.notes, same=dict(os.environ) == before)
result["state"] = framework.state().value
"""
    )
    assert found["enforcement"] == "absent" and found["same"] and found["state"] == "imported"
    assert "sees no GPU" in found["notes"][0] and "its share stays free" in found["notes"][0]


@pytest.mark.parametrize("before", [None, "false", "true"])
@pytest.mark.parametrize(
    ("options", "growth"), [({"growth": True}, "true"), ({"growth": False}, "false"), ({}, "true")]
)
def test_the_limit_is_set_in_mib_read_back_and_undone(
    with_tensorflow: Run, before: str | None, options: dict[str, bool], growth: str
) -> None:
    found = with_tensorflow(
        f"import os\nif {before!r}: os.environ['TF_FORCE_GPU_ALLOW_GROWTH'] = {before!r}\n"
        + ONE
        + f"""
applied = apply_caps(framework, {{uuid: 4 * GIB + 2 * MIB}}, {options!r})
result["applied"] = [applied.enforcement.value, limits(gpu), os.environ[GROWTH], framework.state().value]
applied.undo()
result["undone"] = [limits(gpu), os.environ.get(GROWTH), framework.state().value]
apply_caps(framework, {{uuid: 2 * GIB}})
result["again"] = limits(gpu)
"""
    )
    assert found["applied"] == ["enforced", [4098], growth, "imported"]
    assert found["undone"] == [[], before, "imported"] and found["again"] == [2048]


def test_applied_twice_the_first_limit_stays(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        ONE
        + """
apply_caps(framework, {uuid: 4 * GIB})
apply_caps(framework, {uuid: 4 * GIB}).undo()
result["limits"] = limits(gpu)
"""
    )
    assert found["limits"] == [4096], "what was there before is what an undo restores"


@pytest.mark.parametrize(
    ("mib", "refused"), [([1024], False), ([4096], False), ([4097], True), ([8192], True), ([1024, 1024], True)]
)
def test_a_stricter_limit_of_the_users_own_stays_and_a_looser_one_is_refused(
    with_tensorflow: Run, mib: list[int], refused: bool
) -> None:
    found = with_tensorflow(
        ONE
        + f"""
own(gpu, *{mib!r})
result["setting"] = setting(lambda: apply_caps(framework, {{uuid: 4 * GIB}}))
result["drift"] = drifts(framework)
result["text"] = raised(lambda: apply_caps(framework, {{uuid: 4 * GIB}}))
result["limits"], result["growth"] = limits(gpu), os.environ.get(GROWTH)
"""
    )
    assert found["limits"] == mib and found["drift"] == []
    assert (found["text"] is not None) is refused
    if refused:
        named = f"set_logical_device_configuration of /physical_device:GPU:0 ({', '.join(map(str, mib))} MiB)"
        why, fix = "is looser than the cap of 4.00 GiB", "remove that call"
        if len(mib) > 1:
            why, fix = "splits the GPU into 2 logical devices, which memguard cannot cap as one", "configure it as one"
        assert f"{named} {why}" in found["text"] and found["growth"] is None
        assert found["setting"] == named and f"fix: {fix}" in found["text"]


@pytest.mark.parametrize("growth", [True, False])
@pytest.mark.parametrize("mib", [1024, 4096])
def test_a_stricter_limit_of_the_users_own_is_what_holds_and_it_says_so(
    with_tensorflow: Run, mib: int, growth: bool
) -> None:
    found = with_tensorflow(
        ONE
        + f"""
from tensorflow.python.eager import context
own(gpu, {mib})
applied = apply_caps(framework, {{uuid: 4 * GIB}}, {{"growth": {growth}}})
tf.config.experimental.get_memory_info = lambda name: {{"current": 100, "peak": 300}}
def live(yes): context.context()._context_handle = object() if yes else None
def row():
    usage = framework.usage(device)
    return [usage.held, usage.held_at_most]
live(True)
result["row"], result["notes"] = row(), framework.notes
raised(applied.undo)
framework = TensorFlow(host)
result["again"] = raised(lambda: apply_caps(framework, {{uuid: 4 * GIB}}))
result["row again"], result["notes again"] = row(), framework.notes
result["other"] = raised(lambda: apply_caps(TensorFlow(host), {{uuid: 2 * GIB}}))
result["stricter"] = raised(lambda: apply_caps(TensorFlow(host), {{uuid: 1023 * MIB}}))
live(False)
"""
    )
    holds = mib << 20
    text = "tensorflow: its own memory_limit of 1.00 GiB on GPU:0 is stricter than the cap of 4.00 GiB and stays"
    assert found["row"] == found["row again"] == ([None, holds] if growth else [holds, None])
    assert found["notes"] == found["notes again"] == ([text] if mib == 1024 else []) and found["again"] is None
    assert (found["other"] is None) is (mib == 1024) and f"a limit of {mib // 1024}.00 GiB" in found["stricter"]


def test_a_refusal_leaves_no_note_behind(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        TWO
        + """
own(first, 512)
own(second, 8192)
os.environ[GROWTH] = "false"
result["text"] = raised(lambda: apply_caps(framework, {u: GIB for u in host.uuids}))
result["left"] = [framework.notes, framework._caps, limits(first), os.environ[GROWTH]]
"""
    )
    assert "GPU:1 (8192 MiB) is looser" in found["text"] and found["left"] == [[], {}, [512], "false"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("cuda_malloc_async", "ignores memory_limit"),
        (" CUDA_Malloc_Async ", "ignores memory_limit"),
        ("cuda_malloc", "passes every request on to the driver and has no limit"),
    ],
)
def test_allocators_that_know_no_limit_are_refused(with_tensorflow: Run, value: str, why: str) -> None:
    found = with_tensorflow(
        ONE
        + f"""
os.environ["TF_GPU_ALLOCATOR"] = {value!r}
result["text"], result["limits"] = raised(lambda: apply_caps(framework, {{uuid: GIB}})), limits(gpu)
result["setting"], result["growth"] = setting(lambda: apply_caps(framework, {{uuid: GIB}})), os.environ.get(GROWTH)
os.environ["TF_GPU_ALLOCATOR"] = "bfc"
result["bfc"] = apply_caps(framework, {{uuid: GIB}}).enforcement.value
"""
    )
    assert why in found["text"] and "fix: unset TF_GPU_ALLOCATOR" in found["text"]
    assert found["setting"] == f"TF_GPU_ALLOCATOR={value.strip().lower()}"
    assert found["limits"] == [] and found["growth"] is None and found["bfc"] == "enforced"


@pytest.mark.parametrize("own", ["true", "false", "False", ""])
@pytest.mark.parametrize("growth", [True, False])
def test_of_two_wishes_for_growth_the_budgets_holds_and_it_says_so(
    with_tensorflow: Run, own: str, growth: bool
) -> None:
    found = with_tensorflow(
        ONE
        + f"""
os.environ[GROWTH] = {own!r}
applied = apply_caps(framework, {{uuid: GIB}}, {{"growth": {growth}}})
result["notes"], result["set"] = framework.notes, os.environ[GROWTH]
applied.undo()
result["restored"] = os.environ[GROWTH]
"""
    )
    wanted = str(growth).lower()
    assert found["set"] == wanted and found["restored"] == own
    if own.lower() in ("", wanted):
        assert found["notes"] == []
    else:
        text = f"tensorflow: TF_FORCE_GPU_ALLOW_GROWTH={own.lower()} was set, but the budget's growth: {wanted} holds"
        assert found["notes"] == [text]


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ("", False),
        ("own(gpu, 1024)", False),
        ("own(gpu, 512, 512)", False),
        ("own(gpu, 1025)", False),
        ("own(gpu, 1024, 1)", False),
        ("table()[gpu] = [tf.config.LogicalDeviceConfiguration(memory_limit=1025)]", True),
        ("table()[gpu] = [tf.config.LogicalDeviceConfiguration(memory_limit=m) for m in (1024, 1)]", True),
        ("table().clear()", True),
        ("tf.config.get_logical_device_configuration = lambda gpu: [tf.config.LogicalDeviceConfiguration()]", True),
        ("tf.config.set_logical_device_configuration(gpu, [])", False),
    ],
)
def test_a_limit_that_is_taken_away_before_it_is_live_is_told_then_and_later(
    with_tensorflow: Run, change: str, lost: bool
) -> None:
    found = with_tensorflow(
        ONE
        + f"""
def table(): return __import__("tensorflow.python.eager.context", fromlist="x").context()._virtual_device_map
applied = apply_caps(framework, {{uuid: GIB}})
{change}
result["drift"] = drifts(framework)
framework._live = lambda module: True  # as after the first operation, which would need the GPU
result["live"] = drifts(framework)
framework._live = lambda module: False
applied.undo()
result["undone"] = drifts(framework)
"""
    )
    said = ["tensorflow: the limit of /physical_device:GPU:0 was removed or raised after memguard.init"] if lost else []
    assert found == {"drift": said, "live": said, "undone": []}


def test_a_limit_that_is_taken_away_is_told_of_its_gpu(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        TWO
        + """
apply_caps(framework, {host.uuids[0]: GIB, host.uuids[1]: 2 * GIB})
result["before"] = drifts(framework)
table = __import__("tensorflow.python.eager.context", fromlist="x").context()._virtual_device_map
table[second] = [tf.config.LogicalDeviceConfiguration(memory_limit=2049)]
own(first, 1024)
result["second"] = drifts(framework)
"""
    )
    assert found["before"] == [] and len(found["second"]) == 1 and "GPU:1" in found["second"][0]


def test_live_it_is_too_late(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        SETUP
        + """
tf.zeros((2,))
result["text"], result["growth"] = raised(lambda: apply_caps(framework, {uuid: GIB})), os.environ.get(GROWTH)
"""
    )
    assert "live before memguard.init()" in found["text"] and "before TensorFlow's first operation" in found["text"]
    assert found["growth"] is None


def test_once_live_its_limit_stays_and_the_undo_says_so(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        ONE
        + """
from tensorflow.python.eager import context
applied = apply_caps(framework, {uuid: GIB})
context.context()._context_handle = object()  # as after the first operation, which would need the GPU
result["text"] = raised(applied.undo)
context.context()._context_handle = None
result["limits"], result["growth"] = limits(gpu), os.environ.get(GROWTH)
"""
    )
    assert "its allocator exists; its limit stays" in found["text"]
    assert found["limits"] == [1024] and found["growth"] is None, "children would inherit it"


def test_its_limit_cannot_be_changed(with_tensorflow: Run) -> None:
    found = with_tensorflow(ONE + "result['text'] = raised(lambda: framework.resize({uuid: GIB}))")
    assert "memory_limit is fixed" in found["text"]


def test_every_gpu_is_limited(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        TWO
        + """
applied = apply_caps(framework, {host.uuids[0]: GIB, host.uuids[1]: 2 * GIB})
result["limits"] = limits(first) + limits(second)
applied.undo()
result["undone"] = limits(first) + limits(second)
"""
    )
    assert found == {"limits": [1024, 2048], "undone": []}


def test_a_refusal_on_the_second_gpu_takes_the_first_back(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        TWO
        + """
own(second, 8192)
result["text"] = raised(lambda: apply_caps(framework, {host.uuids[0]: GIB, host.uuids[1]: 2 * GIB}))
result["left"] = [limits(first), limits(second), os.environ.get(GROWTH)]
"""
    )
    assert "GPU:1 (8192 MiB) is looser than the cap of 2.00 GiB" in found["text"] and found["left"] == [
        [],
        [8192],
        None,
    ]


@pytest.mark.parametrize("setup", ["host.uuids[:1]", "[]"])
def test_a_gpu_that_is_not_in_the_budget_is_refused(with_tensorflow: Run, setup: str) -> None:
    found = with_tensorflow(
        TWO
        + f"""
result["text"] = raised(lambda: apply_caps(framework, {{uuid: GIB for uuid in {setup}}}))
result["left"] = [limits(first), limits(second), os.environ.get(GROWTH)]
"""
    )
    assert "cannot be matched with a GPU of the budget" in found["text"] and found["left"] == [[], [], None]


def test_a_limit_that_reads_back_differently_is_refused(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        ONE
        + """
read = tf.config.get_logical_device_configuration
answers = [None, [tf.config.LogicalDeviceConfiguration(memory_limit=7)]]
tf.config.get_logical_device_configuration = lambda gpu: answers.pop(0) if answers else read(gpu)
result["text"], result["growth"] = raised(lambda: apply_caps(framework, {uuid: GIB})), os.environ.get(GROWTH)
result["left"] = limits(gpu)
def broken(gpu, asked=[]):
    asked.append(1)
    if len(asked) == 2: raise RuntimeError("no reading back")
    return read(gpu)
tf.config.get_logical_device_configuration = broken
try:
    apply_caps(framework, {uuid: GIB})
except RuntimeError as error:
    result["error"] = str(error)
result["left then"] = limits(gpu)
"""
    )
    assert "memory_limit reads back as" in found["text"] and found["growth"] is None
    assert found["error"] == "no reading back" and found["left"] == found["left then"] == []


UNNAMED = (
    TWO
    + """
from dataclasses import replace
from memguard.errors import DeviceError
asked = []
plain = [replace(gpu, ordinal=None) for gpu in host.gpus]
def devices(*, ordinals=False):
    asked.append(ordinals)
    if known is None: raise DeviceError("NVML sees no GPU")
    return tuple(replace(gpu, ordinal=n if ordinals else None) for gpu, n in zip(host.gpus, known))
host.devices = devices
figures = {"GPU:0": 10, "GPU:1": 20, "GPU:2": 40}
tf.config.experimental.get_memory_info = lambda name: {"current": figures[name], "peak": figures[name]}
def rows(): return [usage and usage.in_use for usage in map(framework.usage, plain)]
known = (1, 0)
early = [rows(), list(asked)]
framework._live = lambda module: True  # as after the first operation, which would need the GPU
"""
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("", [20, 10]),  # CUDA_VISIBLE_DEVICES=1,0
        ("known = (0, 1)", [10, 20]),
        ("known = (None, None)", [None, None]),
        ("known = None", [None, None]),
        ("tf.config.set_visible_devices([second], 'GPU')", [10, None]),
        ("own(first, 512, 512)", [40, 30]),
    ],
)
def test_not_in_the_budget_each_gpus_figures_are_its_own(
    with_tensorflow: Run, change: str, expected: list[int | None]
) -> None:
    found = with_tensorflow(
        f"{UNNAMED}\n{change}\nresult['early'], result['rows'], result['asked'] = early, [rows(), rows()], asked"
    )
    assert found["early"] == [[None, None], []], "nothing is asked before it is live"
    assert found["rows"] == [expected, expected] and found["asked"] == [True], "and once then"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("known = (None, None)", ["unknown", "unknown"]),
        ("known = (0, None)", [0, "unknown"]),
        ("known = None", ["unknown", "unknown"]),
        ("tf.config.set_visible_devices([], 'GPU'); known = None", [None, None]),
    ],
    ids=["without numbers", "one without", "without an answer", "none visible"],
)
def test_gpus_that_cannot_be_told_apart_are_unknown_and_not_nothing(
    with_tensorflow: Run, change: str, expected: list[Any]
) -> None:
    found = with_tensorflow(
        f"""
{UNNAMED}
{change}
figures = dict.fromkeys(figures, 0)
def held(usage): return usage and ("unknown" if usage.held is usage.held_at_least is None else usage.held_at_least)
result["rows"] = [[held(framework.usage(gpu)) for gpu in plain] for _ in range(2)]
"""
    )
    assert found["rows"] == [expected, expected]


@pytest.mark.parametrize("error", ["ValueError('Allocator stats not available')", "RuntimeError()", "AttributeError()"])
@pytest.mark.parametrize(
    ("devices", "growth", "expected"),
    [
        ("[tf]", True, [None, None, 1 << 30]),
        ("[tf]", False, [1 << 30, None, None]),
        ("[]", True, None),
        ("1 / 0", True, [None, None, 1 << 30]),
    ],
    ids=["growth", "whole", "hidden since", "no list"],
)
def test_an_allocator_without_statistics_is_unknown_and_not_nothing(
    with_tensorflow: Run, error: str, devices: str, growth: bool, expected: list[int | None] | None
) -> None:
    devices = devices.replace("1 / 0", "(_ for _ in ()).throw(RuntimeError())")
    found = with_tensorflow(
        ONE
        + f"""
from memguard._guard.guard import Guard
from memguard._budget import from_mapping
own = {{"limit": "1GiB", "growth": {growth}}}
guard = Guard(from_mapping({{"version": 1, "frameworks": {{"tensorflow": own}}}}), host)
guard.start()
framework = guard.frameworks["tensorflow"]
def broken(name): raise {error}
tf.config.experimental.get_memory_info, tf.config.list_logical_devices = broken, lambda kind: {devices}
framework._live = lambda module: True  # as after the first operation, which would need the GPU
usage = framework.usage(device)
result["usage"] = usage and [usage.held, usage.in_use, usage.held_at_most]
row = guard.ledger().devices[0].row("tensorflow")
result["row"] = [row.bytes, row.in_use]
framework._live = lambda module: False
guard.stop()
"""
    )
    assert found["usage"] == expected
    assert found["row"] == (expected[:2] if expected is not None else [0, None])


GROWING = {"held": None, "in_use": 100, "reclaimable": 0, "held_at_least": 300, "held_at_most": 1 << 30, "peak": 300}
WHOLE = {**GROWING, "held": 1 << 30, "held_at_least": None, "held_at_most": None}


@pytest.mark.parametrize(("growth", "expected"), [(True, GROWING), (False, WHOLE)])
def test_what_it_says_of_its_pool(with_tensorflow: Run, growth: bool, expected: dict[str, Any]) -> None:
    """With growth TensorFlow says what is in use, and not what its pool holds: that is unknown, with bounds."""
    found = with_tensorflow(
        ONE
        + f"""
apply_caps(framework, {{uuid: GIB}}, {{"growth": {growth}}})
asked = []
tf.config.experimental.get_memory_info = lambda name: asked.append(name) or {{"current": 100, "peak": 300}}
result["early"] = [framework.usage(device), list(asked)]
framework._live = lambda module: True  # as after the first operation, which would need the GPU
result["usage"], result["asked"] = framework.usage(device)._asdict(), asked
"""
    )
    assert found["early"] == [None, []], "asking would initialise it"
    assert found["usage"] == expected and found["asked"] == ["GPU:0"]


def test_under_the_guard_from_init_to_shutdown(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        ONE
        + """
from memguard._guard.guard import Guard
from memguard._budget import from_mapping
guard = Guard(from_mapping({"version": 1, "frameworks": {"tensorflow": {"limit": "3GiB", "growth": False}}}), host)
guard.start()
row = guard.ledger().devices[0].row("tensorflow")
result["row"] = [row.enforcement, row.bytes, limits(gpu), os.environ[GROWTH]]
result["stays"] = guard.stop()
result["undone"] = [limits(gpu), os.environ.get(GROWTH)]
"""
    )
    assert found == {"row": ["enforced", 0, [3072], "false"], "stays": [], "undone": [[], None]}


# settings that the user makes later

LATER = """
import logging
heard = []
class Handler(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING: heard.append(record.getMessage())
logging.getLogger("memguard").addHandler(Handler())
"""


@pytest.mark.parametrize(
    "setter",
    [
        "tf.config.set_logical_device_configuration",
        "tf.config.experimental.set_virtual_device_configuration",
        "tf.compat.v1.config.set_logical_device_configuration",
        "tf.compat.v1.config.experimental.set_virtual_device_configuration",
    ],
)
@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ([8192], [1024]), ([1025], [1024]), ([1024], [1024]), ([512], [512]), ([4096, 4096], [512, 512]),
        ([300, 300], [300, 300]), ([3000, 1000], [768, 256]), ([1 << 40], [1024]), ([], [1024]), ([2000.5], [1024]),
    ],
)  # fmt: skip
def test_a_later_limit_meets_the_cap_by_every_name(
    with_tensorflow: Run, setter: str, asked: list[float], holds: list[int]
) -> None:
    found = with_tensorflow(
        ONE
        + LATER
        + f"""
import inspect
kept, signature = {setter}, inspect.signature({setter})
applied = apply_caps(framework, {{uuid: GIB}})
wanted = [tf.config.LogicalDeviceConfiguration(memory_limit=m) for m in {asked!r}]
for _ in range(3):
    kept(gpu, wanted)
result["limits"], result["drift"], result["heard"] = limits(gpu), drifts(framework), heard
result["same"] = kept is {setter} and inspect.signature({setter}) == signature
result["notes"] = framework.notes
applied.undo()
result["undone"] = limits(gpu) == {asked!r}
"""
    )
    assert found["limits"] == holds and found["drift"] == [] and found["same"] and found["undone"]
    if asked and sum(asked) <= 1024:
        assert found["heard"] == [] and found["notes"] == []
    else:
        (said,) = found["heard"]
        assert "more than the cap of 1.00 GiB on GPU:0: the cap holds" in said and found["notes"] == [said]


def test_a_limit_without_a_size_is_tensorflows_own_error(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        ONE
        + """
def text(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
ask = lambda: tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration()])
result["without"] = text(ask)
apply_caps(framework, {uuid: GIB})
result["within"], result["limits"] = text(ask), limits(gpu)
"""
    )
    assert found["within"] == found["without"] and found["limits"] == [1024]


def test_growth_is_set_as_without_a_budget(with_tensorflow: Run) -> None:
    """As tutorials do it for every GPU: TensorFlow refuses it beside a limit, and the limit is the budget's."""
    found = with_tensorflow(
        TWO
        + LATER
        + """
def text(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
applied = apply_caps(framework, {u: GIB for u in host.uuids})
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
result["growth"] = [tf.config.experimental.get_memory_growth(gpu) for gpu in (first, second)]
result["limits"], result["drift"] = [limits(first), limits(second)], drifts(framework)
result["env"] = os.environ[GROWTH]
tf.config.experimental.set_memory_growth(first, False)
result["env"] += os.environ[GROWTH]
own(first, 512)
result["own"] = text(lambda: tf.config.experimental.set_memory_growth(first, True))
result["heard"] = heard
tf.zeros((1,))
result["live"] = text(lambda: tf.config.experimental.set_memory_growth(second, False))
"""
    )
    assert found["growth"] == [True, True] and found["limits"] == [[1024], [1024]] and found["drift"] == []
    assert found["env"] == "truetrue" and found["own"] == "ValueError" and found["heard"] == []
    assert found["live"] == "RuntimeError"


@pytest.mark.parametrize(
    ("config", "holds"),
    [
        ("None", [[1024]]),
        ("tf.compat.v1.ConfigProto()", [[1024]]),
        ("tf.compat.v1.ConfigProto(allow_soft_placement=True)", [[1024]]),
        ("fraction(0.9)", [[1024]]),
        ("fraction(1.0)", [[1024]]),
        ("fraction(1.5)", [[1024]]),
        ("fraction(0.0001)", []),
        ("tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True))", [[1024]]),
        ("split(5000)", [[1024]]),
        ("split(5000, 5000)", [[512, 512]]),
        ("split(100, 100)", [[100, 100]]),
        ("tf.compat.v1.ConfigProto(device_count={'GPU': 0})", []),
    ],
)
@pytest.mark.parametrize("kind", ["Session", "InteractiveSession"])
def test_a_tf1_session_meets_the_cap(with_tensorflow: Run, kind: str, config: str, holds: list[list[int]]) -> None:
    found = with_tensorflow(
        ONE
        + LATER
        + f"""
import inspect
v1 = tf.compat.v1
def fraction(f): return v1.ConfigProto(gpu_options=v1.GPUOptions(per_process_gpu_memory_fraction=f))
def split(*mib):
    config = v1.ConfigProto()
    config.gpu_options.experimental.virtual_devices.add().memory_limit_mb.extend(mib)
    return config
signature = inspect.signature(v1.Session)
applied = apply_caps(framework, {{uuid: GIB}})
given = {config}
before = given.gpu_options.SerializeToString() if given is not None else b""
with tf.Graph().as_default():
    session = v1.{kind}(config=given)
    result["sum"] = float(session.run(tf.constant(1.0) + 2.0))
options = session._config.gpu_options
result["limits"] = [list(v.memory_limit_mb) for v in options.experimental.virtual_devices]
result["both"] = bool(options.per_process_gpu_memory_fraction and result["limits"])
result["theirs"] = given is None or given.gpu_options.SerializeToString() == before
result["same"] = inspect.signature(v1.Session) == signature
result["heard"], result["soft"] = heard, bool(session._config.allow_soft_placement)
result["undo"] = raised(applied.undo)
"""
    )
    assert found["limits"] == holds and not found["both"] and found["theirs"] and found["same"] and found["sum"] == 3.0
    assert len(found["heard"]) == (("fraction" in config and "0.0001" not in config) or "5000" in config)
    assert found["soft"] or "soft" not in config
    assert (found["undo"] is None) == ("'GPU': 0" in config), "its allocator exists; its limit stays"


def test_a_session_of_two_gpus_that_names_one(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        TWO
        + """
v1 = tf.compat.v1
apply_caps(framework, {host.uuids[0]: GIB, host.uuids[1]: 2 * GIB})
def limits_of(**options):
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto(gpu_options=v1.GPUOptions(**options))) as session:
        return [list(v.memory_limit_mb) for v in session._config.gpu_options.experimental.virtual_devices]
result["limits"] = [limits_of(), limits_of(visible_device_list="1"), limits_of(visible_device_list="1,0")]
"""
    )
    assert found["limits"] == [[[1024], [2048]], [[2048]], [[2048], [1024]]]


def test_the_users_lower_limit_holds_in_sessions_too_and_split_gpus_are_numbered(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        TWO
        + """
v1 = tf.compat.v1
apply_caps(framework, {u: GIB for u in host.uuids})
own(first, 200, 100)
with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto()) as session:
    result["limits"] = [list(v.memory_limit_mb) for v in session._config.gpu_options.experimental.virtual_devices]
result["numbers"] = [list(framework._numbers(tf, gpu)) for gpu in host.gpus]
"""
    )
    assert found["limits"] == [[300], [1024]] and found["numbers"] == [[0, 1], [2]]


@pytest.mark.parametrize("name", ["cuda_malloc_async", "CUDA_MALLOC ", "bfc", ""])
@pytest.mark.parametrize("start", ["tf.zeros((1,))", "tf.compat.v1.Session(config=tf.compat.v1.ConfigProto())"])
def test_an_allocator_without_a_limit_chosen_later_is_not_built(with_tensorflow: Run, name: str, start: str) -> None:
    found = with_tensorflow(
        ONE
        + LATER
        + f"""
applied = apply_caps(framework, {{uuid: GIB}})
os.environ["TF_GPU_ALLOCATOR"] = {name!r}
with tf.Graph().as_default(): {start if "v1" in start else "pass"}
{start if "v1" not in start else "pass"}
result["built"], result["heard"] = os.environ.get("TF_GPU_ALLOCATOR"), heard
result["undo"] = raised(applied.undo)
result["after"] = os.environ["TF_GPU_ALLOCATOR"]
"""
    )
    lost = "malloc" in name.lower()
    assert found["built"] == (None if lost else name) and found["after"] == name and found["undo"]
    assert len(found["heard"]) == lost and (not lost or f"TF_GPU_ALLOCATOR={name} was set after" in found["heard"][0])


def test_in_a_forked_child_nothing_is_held(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        ONE
        + LATER
        + """
apply_caps(framework, {uuid: GIB})
framework.forked()
own(gpu, 4096)
with tf.Graph().as_default(), tf.compat.v1.Session(config=tf.compat.v1.ConfigProto()) as session:
    result["limits"] = len(session._config.gpu_options.experimental.virtual_devices)
result["own"], result["heard"] = limits(gpu), heard
"""
    )
    assert found == {"limits": 0, "own": [4096], "heard": []}


def test_everything_replaced_is_put_back_also_after_an_interruption(with_tensorflow: Run) -> None:
    found = with_tensorflow(
        ONE
        + """
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager.context import Context
def now(): return [Context.set_logical_device_configuration, Context.set_memory_growth, BaseSession.__init__,
    Context._compute_gpu_options]
before, table = now(), TensorFlow._limit
applied = apply_caps(framework, {uuid: GIB})
result["replaced"] = [a is not b for a, b in zip(now(), before)]
applied.undo()
result["back"] = now() == before and limits(gpu) == []
for step in range(4):
    from memguard._frameworks.replacements import Replacements
    put, left = Replacements.put, [step]
    def interrupted(self, *args):
        if not left[0]: raise KeyboardInterrupt
        left[0] -= 1
        return put(self, *args)
    Replacements.put = interrupted
    try:
        apply_caps(TensorFlow(host), {uuid: GIB})
    except KeyboardInterrupt:
        result["back"] &= now() == before and limits(gpu) == [] and GROWTH not in os.environ
    else:
        result["back"] = False
    Replacements.put = put
"""
    )
    assert found == {"replaced": [True] * 4, "back": True}


def test_nothing_of_a_failed_run_is_alive_in_the_next(with_tensorflow: Run) -> None:
    """The error comes out of a Keras layer, which raises it again from none."""
    found = with_tensorflow(
        """
        import memguard, tensorflow as tf
        from retried import begin, know, left
        TEXT = "OOM when allocating tensor with shape[1024,1024] and type float on /job:localhost/replica:0/task:0/"
        class Layer(tf.keras.layers.Layer):
            def call(self, x):
                held = know(tf.ones([7]))
                if len(left) == 1:
                    raise tf.errors.ResourceExhaustedError(None, None, TEXT + "device:GPU:0 by allocator GPU_0_bfc")
                return x + tf.reduce_sum(held)
        def step():
            begin()
            x = know(tf.ones([3]))
            return float(tf.reduce_sum(Layer()(x)))
        result["found"], result["left"] = memguard.retry.call(step), left
        """
    )
    assert found["found"] == 24.0 and found["left"] == [0, 0]
