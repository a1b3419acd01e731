"""The real JAX on a CPU: its own options and errors, with a stand-in only for a CUDA backend that has started."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._base.units import GIB, GRANULE, MIB
from memguard._frameworks.jax.adapter import _fraction

Run = Callable[..., dict[str, Any]]

SETUP = """
import jax
sys.path.append(PLUGIN)
from memguard.errors import ConflictingSetting
from memguard._frameworks.jax.adapter import JAX
OPTIONS = "jax_pjrt_client_create_options"
host = Host()
framework, uuid, gpu = JAX(host), host.uuids[0], host.gpus[0]
def options(): return getattr(jax.config, OPTIONS)
def exact(total=TOTAL): return int(options()["memory_fraction"] * total)
def started(): return sorted(sys.modules["jax._src.xla_bridge"]._backends)
def conflict(*caps):
    try:
        apply_caps(framework, dict(zip(host.uuids, caps)))
    except ConflictingSetting as error:
        return [error.framework, error.setting, str(error)]
"""
OPTIONS = "jax_pjrt_client_create_options"
TWO = SETUP.replace("Host()", 'Host("h200", "h200")')


# where it is


def test_a_build_without_a_cuda_plugin_is_absent_and_nothing_is_imported_to_see_it(alone: Run) -> None:
    found = alone(
        """
        from memguard._frameworks.jax.adapter import JAX
        framework = JAX(Host())
        import pathlib, tempfile
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "jax_plugins", "xla_rocm7").mkdir(parents=True)
            sys.path.append(folder)
            result["state"], result["why"] = framework.state().value, framework.why_absent()
            sys.path.remove(folder)
        sys.path.append(PLUGIN)
        result["with"] = [framework.state().value, framework.why_absent()]
        result["asked"] = []
        for platforms in ("cpu", " CPU ,tpu", "CUDA", "cuda,cpu", "gpu", ""):
            os.environ["JAX_PLATFORMS"] = platforms
            result["asked"].append(framework.state().value)
        os.environ["JAX_PLATFORMS"] = "cpu"
        result["cpu"] = framework.why_absent()
        result["imported"] = sorted({"jax", "jaxlib", "jax_plugins"} & set(sys.modules))
        """
    )
    assert found == {
        "state": "absent",
        "why": "this jax has no CUDA plugin; fix: pip install 'jax[cuda13]' or 'jax[cuda12]'",
        "with": ["importable", None],
        "asked": ["absent", "absent", "importable", "importable", "importable", "importable"],
        "cpu": "JAX_PLATFORMS=cpu keeps jax off the GPU",
        "imported": [],
    }


def test_imported_without_a_plugin_it_is_absent_and_looking_starts_nothing(with_jax: Run) -> None:
    found = with_jax(
        SETUP.replace("sys.path.append(PLUGIN)", "")
        + """
result["state"] = framework.state().value
result["nothing"] = [framework.usage(gpu), framework.trim(gpu), framework.record(), framework.about()]
result["drift"], result["oom"] = drifts(framework), issubclass(jax.errors.JaxRuntimeError, RuntimeError)
result["started"] = started()
"""
    )
    assert found == {
        "state": "absent", "nothing": [None, None, None, {}], "drift": [], "oom": True, "started": [],
    }  # fmt: skip


def test_capping_starts_no_backend_and_the_cpu_is_not_live(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
result["states"] = [framework.state().value]
apply_caps(framework, {uuid: GIB})
result["nothing"] = [framework.usage(gpu), framework.trim(gpu), framework.about(), drifts(framework)]
result["started"] = [started()]
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
result["sum"] = float(jax.numpy.ones(3).sum())
result["started"].append(started())
result["nothing"] += [framework.usage(gpu), framework._live(jax)]
"""
    )
    assert found["states"] == ["imported"] and found["started"] == [[], ["cpu"]] and found["sum"] == 3.0
    assert found["nothing"] == [None, None, {}, [], None, False]


def test_what_the_program_asks_for_counts_before_the_environment(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
jax.config.update("jax_platforms", "cpu")
result["cpu"] = [framework.state().value, framework.why_absent()]
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cuda,cpu")
result["cuda"] = framework.state().value
"""
    )
    assert found == {"cpu": ["absent", "JAX_PLATFORMS=cpu keeps jax off the GPU"], "cuda": "imported"}


def test_capped_under_the_hook(alone: Run) -> None:
    found = alone(
        """
        import importlib.machinery
        sys.path.append(PLUGIN)
        from memguard._frameworks.jax.adapter import JAX
        from memguard._frameworks.import_hook import ImportHook
        host = Host()
        framework, hook = JAX(host), ImportHook()
        hook.watch(framework.hook, lambda: apply_caps(framework, {host.uuids[0]: 4 * GIB}) and None)
        import jax
        options = jax.config.jax_pjrt_client_create_options
        result["exact"], result["preallocate"] = int(options["memory_fraction"] * TOTAL), options["preallocate"]
        result["gone"] = hook not in sys.meta_path
        result["loader"] = type(jax.__spec__.loader) is importlib.machinery.SourceFileLoader
        result["started"] = list(sys.modules["jax._src.xla_bridge"]._backends)
        """
    )
    assert 0 <= 4 * GIB - found.pop("exact") < MIB
    assert found == {"preallocate": False, "gone": True, "loader": True, "started": []}


# the fraction


@given(
    total=st.integers(512, 512 * 1024).map(lambda mib: mib * MIB),
    share=st.floats(0, 1),
)
def test_the_fraction_never_passes_the_cap_and_is_the_largest_that_does_not(total: int, share: float) -> None:
    """As the client takes it, in single precision."""
    cap = max(int(total * share) // GRANULE * GRANULE, GRANULE)
    fraction = _fraction(cap, total)
    bits = struct.unpack("I", struct.pack("f", fraction))[0]
    above = struct.unpack("f", struct.pack("I", bits + 1))[0]
    assert struct.unpack("f", struct.pack("f", fraction))[0] == fraction
    assert 0 < int(fraction * total) <= cap < int(above * total) + 1


@pytest.mark.parametrize("before", ["None", "{}", "''", "{'collective_memory_size': 7}", "'collective_memory_size:7'"])
def test_the_options_are_merged_read_back_and_undone(with_jax: Run, before: str) -> None:
    found = with_jax(
        SETUP
        + f"""
jax.config.update(OPTIONS, {before})
before = options()
applied = apply_caps(framework, {{uuid: 4 * GIB}})
result["kind"] = [applied.enforcement.value, applied.permanent, applied.notes]
result["exact"], result["options"] = exact(), {{k: v for k, v in options().items() if k != "memory_fraction"}}
result["drift"], result["notes"] = drifts(framework), framework.notes
applied.undo()
result["undone"], result["drift after"] = options() == before and type(options()) is type(before), drifts(framework)
apply_caps(framework, {{uuid: 2 * GIB}})
result["again"] = exact()
"""
    )
    assert found["kind"] == ["enforced", None, []] and found["drift"] == found["notes"] == []
    size = {"collective_memory_size": "7" if "'c" in before[:2] else 7} if "size" in before else {}
    assert found["options"] == {"preallocate": False, "allocator": "bfc", **size}
    assert 0 <= 4 * GIB - found["exact"] < 32 * 1024 and 0 <= 2 * GIB - found["again"] < 32 * 1024
    assert found["undone"] and found["drift after"] == []


def test_options_of_the_environment_are_merged(alone: Run) -> None:
    found = alone(
        "os.environ['JAX_PJRT_CLIENT_CREATE_OPTIONS'] = 'memory_fraction:0.001;allocator:bfc'\n"
        + SETUP
        + """
applied = apply_caps(framework, {uuid: 4 * GIB})
result["options"], result["notes"] = options(), framework.notes
applied.undo()
result["undone"] = options()
"""
    )
    assert found["options"] == {"memory_fraction": 0.001, "preallocate": False, "allocator": "bfc"}
    assert "memory_fraction=0.001 is stricter than the cap and stays" in found["notes"][0]
    assert found["undone"] == "memory_fraction:0.001;allocator:bfc"


def test_an_undo_leaves_options_that_were_changed_since(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
applied = apply_caps(framework, {uuid: GIB})
jax.config.update(OPTIONS, {"memory_fraction": 0.5})
applied.undo()
result["options"] = options()
"""
    )
    assert found["options"] == {"memory_fraction": 0.5}


def test_several_gpus_get_the_smallest_fraction(with_jax: Run) -> None:
    found = with_jax(
        TWO
        + """
applied = apply_caps(framework, {host.uuids[0]: 4 * GIB, host.uuids[1]: 2 * GIB})
result["first"] = [exact(), framework.notes]
applied.undo()
framework = JAX(host)
apply_caps(framework, dict.fromkeys(host.uuids, GIB))
result["same"] = framework.notes
"""
    )
    exact, notes = found["first"]
    assert 0 <= 2 * GIB - exact < MIB and "one fraction for all GPUs" in notes[0] and found["same"] == []


def test_a_version_without_the_option_is_refused(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
import types
jax.config, jax.__version__ = types.SimpleNamespace(), "0.4.1"
result["text"] = raised(lambda: apply_caps(framework, {uuid: GIB}))
"""
    )
    assert "jax 0.4.1 has no option jax_pjrt_client_create_options" in found["text"] and "fix:" in found["text"]


def test_no_gpu_of_the_budget_is_refused(with_jax: Run) -> None:
    found = with_jax(
        SETUP + "result['text'], result['options'] = raised(lambda: apply_caps(framework, {'GPU-x': GIB})), options()"
    )
    assert "no GPU of the budget is visible" in found["text"] and found["options"] is None


def test_options_that_read_back_differently_are_refused(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
update = jax.config.update
type(jax.config).update = lambda self, name, value: None
result["text"] = raised(lambda: apply_caps(framework, {uuid: GIB}))
"""
    )
    assert "the options read back as None" in found["text"] and "leave jax out of the budget" in found["text"]


def test_options_that_read_back_differently_do_not_stay(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
update = type(jax.config).update
def wrong(self, name, value): update(self, name, {**value, "memory_fraction": 0.9} if value else value)
type(jax.config).update = wrong
result["text"], result["options"] = raised(lambda: apply_caps(framework, {uuid: GIB})), options()
"""
    )
    assert "the options read back as {" in found["text"] and found["options"] is None


# settings of the user's own


def test_both_variables_are_refused(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
os.environ.update(XLA_CLIENT_MEM_FRACTION="0.001", XLA_PYTHON_CLIENT_MEM_FRACTION="0.001")
result["conflict"], result["options"] = conflict(GIB), options()
from jaxlib import xla_client
try:
    xla_client.generate_pjrt_gpu_plugin_options()
except ValueError as error:
    result["jax"] = str(error)
"""
    )
    framework, setting, text = found["conflict"]
    assert framework == "jax" and setting == "XLA_CLIENT_MEM_FRACTION and XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert "silently uses the CPU" in text and "unset XLA_PYTHON_CLIENT_MEM_FRACTION" in text
    assert found["options"] is None and "specified together" in found["jax"], "JAX itself refuses them"


@pytest.mark.parametrize("where", ["environment", "option"])
@pytest.mark.parametrize(
    ("allocator", "why"),
    [("platform", "has no limit"), ("cuda_async", "has no limit"), ("CUDA_Async", "has no limit"),
     ("vmm", "keeps to JAX's fraction, but tells neither"), ("address", "is no allocator of which"),
     ("bfc", None), ("default", None), ("BFC", None), ("", None)],
)  # fmt: skip
def test_allocators_that_cannot_be_capped_are_refused(with_jax: Run, where: str, allocator: str, why: str) -> None:
    setting, name = {
        "environment": (f"os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] = {allocator!r}", "XLA_PYTHON_CLIENT_ALLOCATOR"),
        "option": (f"jax.config.update(OPTIONS, {{'allocator': {allocator!r}}})", f"{OPTIONS} allocator"),
    }[where]
    found = with_jax(
        SETUP
        + f"""
{setting}
before = options()
result["conflict"], result["same"] = conflict(GIB), options() == before
"""
    )
    assert (found["conflict"] is not None) is (why is not None) is found["same"]
    if why is not None:
        assert found["conflict"][1] == f"{name}={allocator}" and why in found["conflict"][2]


def test_the_option_in_the_environment_is_refused_too(alone: Run) -> None:
    """The doctor finds it there; JAX reads it at its import."""
    found = alone(
        "os.environ['JAX_PJRT_CLIENT_CREATE_OPTIONS'] = 'memory_fraction:0.001;allocator:vmm'\n"
        + SETUP
        + "result['conflict'] = conflict(GIB)"
    )
    assert found["conflict"][1] == f"{OPTIONS} allocator=vmm" and "keeps to JAX's fraction" in found["conflict"][2]


OWN = {
    "XLA_CLIENT_MEM_FRACTION": "os.environ['XLA_CLIENT_MEM_FRACTION'] = '{0}'",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] = '{0}'",
    "jax_pjrt_client_create_options memory_fraction": "jax.config.update(OPTIONS, 'memory_fraction:{0}')",
}
"""Each way to ask for a fraction, by the name that memguard gives it."""


@pytest.mark.parametrize("name", OWN)
def test_a_stricter_fraction_stays(with_jax: Run, name: str) -> None:
    found = with_jax(
        SETUP
        + f"""
{OWN[name].format("0.01")}
apply_caps(framework, {{uuid: 4 * GIB}})
result["fraction"], result["notes"], result["drift"] = options()["memory_fraction"], framework.notes, drifts(framework)
"""
    )
    assert found["fraction"] == 0.01 and found["drift"] == []
    assert found["notes"] == [f"jax: its own {name}=0.01 is stricter than the cap and stays"]


LOOSER = "is looser than the cap of 4.00 GiB"
REFUSED = {
    **dict.fromkeys(["0.03", "1", "2.5"], LOOSER),
    **dict.fromkeys(["half", "50%", "nan", "inf", "0", "-0.5"], "cannot be read"),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("value", REFUSED)
def test_a_fraction_that_is_looser_or_cannot_be_read_is_refused(with_jax: Run, name: str, value: str) -> None:
    found = with_jax(
        SETUP
        + f"""
{OWN[name].format(value)}
before = options()
result["conflict"], result["same"] = conflict(4 * GIB), options() == before
"""
    )
    _, setting, text = found["conflict"]
    assert setting == f"{name}={value}" and REFUSED[value] in text and found["same"]


def test_a_fraction_that_is_looser_on_one_gpu_only_is_refused(with_jax: Run) -> None:
    found = with_jax(
        TWO
        + """
os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.02"
result["conflict"] = conflict(4 * GIB, 2 * GIB)
"""
    )
    assert "is looser than the cap of 2.00 GiB" in found["conflict"][2]


def test_the_fraction_of_the_cap_itself_is_no_conflict(with_jax: Run) -> None:
    """Written with few digits it may pass the cap by a little: then the cap's is set."""
    found = with_jax(
        SETUP
        + """
os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.0286123"
apply_caps(framework, {uuid: 4 * GIB})
result["exact"], result["notes"] = exact(), framework.notes
"""
    )
    assert 0 <= 4 * GIB - found["exact"] < 32 * 1024 and found["notes"] == []


def test_a_fraction_that_is_no_number_is_refused(with_jax: Run) -> None:
    found = with_jax(
        SETUP + "jax.config.update(OPTIONS, {'memory_fraction': [0.1]})\nresult['conflict'] = conflict(4 * GIB)"
    )
    assert "cannot be read" in found["conflict"][2]


@pytest.mark.parametrize(
    ("variable", "option", "kept"),
    [(None, None, False), ("true", None, True), ("1", None, True), ("false", None, False), ("False", None, False),
     ("0", None, False), ("", None, False), (None, True, True), (None, "true", True), (None, "false", False),
     ("true", False, False)],
)  # fmt: skip
def test_preallocation_that_was_asked_for_is_kept_and_said(
    with_jax: Run, variable: str | None, option: bool | str | None, kept: bool
) -> None:
    found = with_jax(
        SETUP
        + f"""
if {variable!r} is not None: os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = {variable!r}
if {option!r} is not None: jax.config.update(OPTIONS, {{"preallocate": {option!r}}})
apply_caps(framework, {{uuid: 4 * GIB}})
result["preallocate"], result["notes"] = options()["preallocate"], framework.notes
"""
    )
    assert found["preallocate"] is kept
    asked = "XLA_PYTHON_CLIENT_PREALLOCATE" if option is None else "jax_pjrt_client_create_options preallocate"
    note = f"jax: {asked} stays, so JAX takes its whole cap when its backend starts"
    assert found["notes"] == [note] * kept


# what changes later, and what is live


@pytest.mark.parametrize(
    ("change", "fraction", "allocator", "said"),
    [
        ("{'memory_fraction': 0.5}", None, "bfc", "memory_fraction=0.5"),
        ("{'memory_fraction': 1.0, 'preallocate': True}", None, "bfc", "memory_fraction=1.0"),
        ("'memory_fraction:0.5'", None, "bfc", "memory_fraction=0.5"),
        ("{'memory_fraction': 'half'}", None, "bfc", "memory_fraction=half"),
        ("{'memory_fraction': 0}", None, "bfc", "memory_fraction=0"),
        ("{'memory_fraction': 0.001}", 0.001, "bfc", ""),
        ("{'memory_fraction': 0.001, 'allocator': 'default'}", 0.001, "default", ""),
        ("{'allocator': 'cuda_async'}", None, "bfc", "allocator=cuda_async"),
        (
            "{'allocator': 'platform', 'memory_fraction': 0.9}",
            None,
            "bfc",
            "memory_fraction=0.9 and allocator=platform",
        ),
        ("None", None, "bfc", ""),
        ("{}", None, "bfc", ""),
        ("{**options(), 'preallocate': True}", None, "bfc", ""),
        ("{'visible_devices': [0]}", None, "bfc", ""),
    ],
)
def test_options_that_are_set_later_meet_the_cap(
    with_jax: Run, change: str, fraction: float | None, allocator: str, said: str
) -> None:
    found = with_jax(
        SETUP
        + f"""
import inspect
from jax import config as taken_before
update, signature = type(jax.config).update, inspect.signature(jax.config.update)
applied = apply_caps(framework, {{uuid: 4 * GIB}})
cap, asked = options()["memory_fraction"], {change}
for _ in range(2): taken_before.update(OPTIONS, asked)
result["cap"] = options()["memory_fraction"] == cap
result["options"], result["drift"], result["notes"] = options(), drifts(framework), framework.notes
result["same"] = inspect.signature(jax.config.update) == signature and type(jax.config).update.__doc__ == update.__doc__
jax.config.update("jax_enable_x64", True)
result["x64"] = jax.config.jax_enable_x64
applied.undo()
result["undone"] = getattr(jax.config, OPTIONS) == asked
result["back"] = type(jax.config).update is update
"""
    )
    assert found["drift"] == [] and found["same"] and found["undone"] and found["back"] and found["x64"]
    assert found["options"]["allocator"] == allocator and found["cap"] == (fraction is None)
    assert fraction is None or found["options"]["memory_fraction"] == fraction
    assert found["options"]["preallocate"] is ("'preallocate': True" in change)
    assert [note for note in found["notes"] if f"asks for {said}, past its cap of 4.00 GiB" in note] == found["notes"]
    assert len(found["notes"]) == bool(said)


def test_in_a_forked_child_later_options_are_its_own(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
apply_caps(framework, {uuid: 4 * GIB})
framework.forked()
jax.config.update(OPTIONS, {"memory_fraction": 0.5})
result["options"], result["notes"] = options(), framework.notes
"""
    )
    assert found == {"options": {"memory_fraction": 0.5}, "notes": []}


def test_an_allocator_in_the_environment_later_changes_nothing(with_jax: Run) -> None:
    """The options win over it: asked of the very functions that JAX's CUDA plugin calls."""
    found = with_jax(
        SETUP
        + """
from jaxlib import xla_client
from jax._src import xla_bridge
apply_caps(framework, {uuid: 4 * GIB})
os.environ.update(XLA_PYTHON_CLIENT_ALLOCATOR="cuda_async", XLA_PYTHON_CLIENT_MEM_FRACTION="0.9")
given = {**xla_client.generate_pjrt_gpu_plugin_options(), **xla_bridge._options_from_jax_configs("cuda")}
result["given"] = [given["allocator"], given["memory_fraction"] == options()["memory_fraction"], given["preallocate"]]
"""
    )
    assert found["given"] == ["bfc", True, False]


@pytest.mark.parametrize(
    ("change", "seen"),
    [("{'memory_fraction': 0.5}", True), ("None", True), ("'memory_fraction:0.5'", True), ("{}", True),
     ("{**options(), 'allocator': 'cuda_async'}", True), ("{**options(), 'preallocate': True}", False)],
)  # fmt: skip
def test_options_that_were_changed_past_the_setter_are_seen(with_jax: Run, change: str, seen: bool) -> None:
    found = with_jax(
        SETUP
        + f"""
apply_caps(framework, {{uuid: 4 * GIB}})
jax.config._value_holders[OPTIONS]._set({change})
result["drift"] = drifts(framework)
"""
    )
    said = ["jax: its jax_pjrt_client_create_options were changed after memguard.init: the cap will not hold"]
    assert found["drift"] == said * seen


def test_a_backend_that_started_otherwise_is_seen(with_jax: Run) -> None:
    found = with_jax(
        TWO
        + """
apply_caps(framework, dict.fromkeys(host.uuids, 4 * GIB))
for name, limits in {"right": (4 * GIB, 4 * GIB - 100), "wrong": (4 * GIB, 100 * GIB), "none": (None, GIB)}.items():
    backend(*limits)
    result[name] = drifts(framework)
framework = JAX(host)
sys.modules["jax._src.xla_bridge"]._backends.clear()
apply_caps(framework, {host.uuids[0]: 4 * GIB})
backend(4 * GIB, 100 * GIB)
result["not in the budget"] = drifts(framework)
"""
    )
    assert found["right"] == found["not in the budget"] == []
    assert found["wrong"] == ["jax: its backend started with a limit of 100.00 GiB on cuda:1, but its cap is 4.00 GiB"]
    assert found["none"] == ["jax: its backend started without a limit on cuda:0, but its cap is 4.00 GiB"]


def test_live_before_it_is_too_late(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
backend(100 * GIB)
result["state"], result["text"] = framework.state().value, raised(lambda: apply_caps(framework, {uuid: GIB}))
result["options"], result["drift"] = options(), drifts(framework)
"""
    )
    assert found["state"] == "live" and found["options"] is None and found["drift"] == []
    assert "it was live before memguard.init()" in found["text"] and "before JAX's first operation" in found["text"]


def test_usage_by_gpu_and_nothing_where_it_is_not(with_jax: Run) -> None:
    found = with_jax(
        TWO
        + """
result["early"] = framework.usage(gpu)
backend(4 * GIB, held=GIB)
result["first"], result["second"] = framework.usage(gpu)._asdict(), framework.usage(host.gpus[1])
framework = JAX(host)
first, _ = backend(None, None)
result["without"] = framework.usage(gpu)._asdict()
first.memory_stats = lambda: {"bytes_in_use": 5}
result["only use"] = framework.usage(gpu)._asdict()
result["about"] = framework.about()
framework.trim(gpu)
"""
    )
    known = {"held": GIB, "in_use": GIB // 2, "reclaimable": 0, "peak": GIB}
    nothing = {"held_at_least": None, "held_at_most": None}
    assert found["early"] is None and found["first"] == {**known, **nothing} and found["second"] is None
    assert found["only use"] == {**dict.fromkeys(known), **nothing, "in_use": 5}
    assert found["without"] == {**dict.fromkeys(known), **nothing} and found["about"] == {"allocator": "bfc"}


def test_its_gpus_are_those_of_cudas_numbers(with_jax: Run) -> None:
    """CUDA_VISIBLE_DEVICES=1,0: the numbers of the client are not those of NVML."""
    found = with_jax(
        TWO
        + """
import dataclasses
turned = [dataclasses.replace(gpu, ordinal=1 - number) for number, gpu in enumerate(host.gpus)]
host.devices = lambda ordinals=False: tuple(turned)
first, second = backend(4 * GIB, 2 * GIB)
first.memory_stats = lambda: {"pool_bytes": 1, "bytes_in_use": 1, "peak_bytes_in_use": 1}
result["held"] = [framework.usage(gpu).held for gpu in turned]
"""
    )
    assert found["held"] == [0, 1]


def test_where_cudas_numbers_are_unknown_no_other_gpu_is_shown(with_jax: Run) -> None:
    found = with_jax(
        TWO
        + """
import dataclasses
unknown = [dataclasses.replace(gpu, ordinal=None, index=5 + number) for number, gpu in enumerate(host.gpus)]
host.devices = lambda ordinals=False: tuple(unknown)
backend(4 * GIB, held=GIB)
result["several"] = [[u.held, u.in_use] for u in map(framework.usage, unknown)]
del unknown[1]
result["one"] = JAX(host).usage(gpu).held
"""
    )
    assert found["several"] == [[None, None], [None, None]] and found["one"] == GIB


def test_its_limit_cannot_be_changed(with_jax: Run) -> None:
    found = with_jax(SETUP + "result['text'] = raised(lambda: framework.resize({uuid: GIB}))")
    assert "memory_fraction is fixed" in found["text"]


STANDING = (
    SETUP
    + """
applied = apply_caps(framework, {uuid: 4 * GIB})
backend(4 * GIB, held=GIB)
result["stays"] = raised(applied.undo)
framework = JAX(host)
"""
)


def test_once_live_its_limit_stays_and_the_same_budget_is_accepted(with_jax: Run) -> None:
    found = with_jax(
        STANDING
        + """
again = apply_caps(framework, {uuid: 4 * GIB})
result["again"] = [again.enforcement.value, raised(again.undo), again.permanent, framework.usage(gpu).held]
result["drift"] = drifts(framework)
backend(100 * GIB)
result["later"] = drifts(framework)
"""
    )
    assert "its backend has started; its limit stays" in found["stays"]
    assert found["again"] == ["enforced", None, "its limit stays from the budget before", GIB]
    assert found["drift"] == []
    assert found["later"] == ["jax: its backend started with a limit of 100.00 GiB on cuda:0, but its cap is 4.00 GiB"]


@pytest.mark.parametrize("caps", ["{uuid: 2 * GIB}", "{uuid: 8 * GIB}", "{}"])
def test_once_live_another_budget_is_refused(with_jax: Run, caps: str) -> None:
    found = with_jax(STANDING + f"result['text'] = raised(lambda: apply_caps(framework, {caps}))")
    assert "it went live with a limit of 4.00 GiB, which cannot change" in found["text"]
    assert "write jax: {limit: 4096MiB}" in found["text"]


def test_under_the_guard_from_init_to_shutdown(with_jax: Run) -> None:
    found = with_jax(
        SETUP
        + """
from memguard._guard.guard import Guard
from memguard._budget import from_mapping
guard = Guard(from_mapping({"version": 1, "frameworks": {"jax": {"limit": "3GiB"}}}), host)
guard.start()
row = guard.ledger().devices[0].row("jax")
result["row"], result["exact"] = [row.enforcement, row.bytes], exact()
jax.config._value_holders[OPTIONS]._set(None)
ledger = guard.ledger()
result["drifted"] = [ledger.devices[0].row("jax").enforcement, list(ledger.notes)]
result["stays"], result["started"] = guard.stop(), started()
"""
    )
    assert found["row"] == ["enforced", 0] and 0 <= 3 * GIB - found["exact"] < 32 * 1024
    enforcement, notes = found["drifted"]
    assert enforcement == "watched" and any("were changed after memguard.init" in note for note in notes)
    assert found["stays"] == [] and found["started"] == []


def test_nothing_of_a_failed_run_is_alive_in_the_next(with_jax: Run) -> None:
    """The error comes out of a trace, whose frames JAX filters."""
    found = with_jax(
        """
        import jax, memguard
        from retried import begin, know, left
        def inner(x):
            held = know(jax.numpy.ones(7))
            if len(left) == 1:
                text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes."
                raise jax.errors.JaxRuntimeError(text)
            return x + held.sum()
        def step():
            begin()
            x = know(jax.numpy.ones(3))
            return float(jax.jit(lambda v: inner(v).sum())(x))
        result["found"], result["left"] = memguard.retry.call(step), left
        """
    )
    assert found["found"] == 24.0 and found["left"] == [0, 0]
