"""The classifier against the whole corpus: none wrong, and none that it does not survive being changed a little."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from re import _parser as regex_parser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._oom import classify as rules
from memguard._oom import hooks
from memguard._oom.classify import RULES, Rule
from memguard._oom.report import Classification, ErrorFacts, classify

HERE = Path(__file__).parent
CORPUS = {name: json.loads((HERE / f"{name}.json").read_text(encoding="utf-8")) for name in ("real", "lookalikes")}
ENTRIES = [entry for entries in CORPUS.values() for entry in entries]


def facts_of(entry: dict[str, Any], text: str | None = None) -> ErrorFacts:
    text = entry["text"] if text is None else text
    return ErrorFacts(entry["type"], tuple(entry["mro"]), text, entry.get("attributes", {}))


def expected(entry: dict[str, Any]) -> Classification:
    return Classification(**entry["expect"])


def first_line(entry: dict[str, Any]) -> tuple[str, str]:
    """Type and first line, with figures and file names masked: all that tells one error from another."""
    line = entry["text"].strip().partition("\n")[0]
    return entry["type"], re.sub(r"\d[\d.,]*([KMGT]i?B)?", "#", re.sub(r'"[^"]*[/\\][^"]*"', '""', line)).strip()


# A look-alike that reads as a real one does: nobody can tell it from its text, and "possibly GPU memory" is right.
REAL = {first_line(entry): entry for entry in CORPUS["real"]}
TWINS = {
    e["id"]: REAL[first_line(e)] for e in CORPUS["lookalikes"] if not e["expect"]["certain"] and first_line(e) in REAL
}


def test_who_cannot_be_told_from_a_real_one() -> None:
    """Named, so that no rule can hide behind it: page-locked memory, a CPU's, and a wrong device."""
    assert set(TWINS) == {
        "cupy-pinned-5",
        "h200-cupy-pinned",
        "h200-torch-pinned",
        "jax-cpu-device-ordinal",
        "torch-nvml-assert-wrong-device",
    }
    assert not any(twin["expect"]["certain"] for twin in TWINS.values())


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["id"] for entry in ENTRIES])
def test_none_wrong(entry: dict[str, Any]) -> None:
    found, wanted = classify(facts_of(entry)), expected(entry)
    if (twin := TWINS.get(entry["id"])) is not None:
        assert not found.certain
        assert (found.memory, found.requester) in [
            (wanted.memory, wanted.requester),
            (twin["expect"]["memory"], twin["expect"]["requester"]),
        ]
        assert found.requested == wanted.requested or wanted.memory == "none"
        return
    assert (found.memory, found.requester, found.certain) == (wanted.memory, wanted.requester, wanted.certain)
    if wanted.requested is None or found.requested is None:
        assert found.requested == wanted.requested
    else:  # the corpus has the printed digits times their unit, to the byte
        assert abs(found.requested - wanted.requested) <= 1


PATH = re.compile(r"(?<![\w<:.~])/(?=[\w.-]+/)")


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["id"] for entry in ENTRIES])
def test_where_the_library_was_built_does_not_matter(entry: dict[str, Any]) -> None:
    assert classify(facts_of(entry, PATH.sub("/srv/build-7/", entry["text"]))) == classify(facts_of(entry))


def wrapped(entry: dict[str, Any]) -> ErrorFacts:
    """As DataLoader, DataParallel, Ray and pools hand on what a worker raised: its traceback as text."""
    name = entry["type"].removeprefix("builtins.")
    text = (
        f"Caught {name.rpartition('.')[2]} in replica 1 on device 1.\nOriginal Traceback (most recent call last):\n"
        f'  File "site-packages/worker.py", line 374, in _worker\n    data = fetch(index)\n{name}: {entry["text"]}'
    )
    return ErrorFacts("builtins.RuntimeError", ("builtins.RuntimeError", "builtins.Exception"), text, {})


# What Keras, tf.function and the eager runtime put before TensorFlow's own words, and what Keras puts behind them.
AROUND = [
    ("{{function_node __wrapped__AddV2_device_/job:localhost/replica:0/task:0/device:GPU:0}} ", " [Op:AddV2] name: "),
    ("{{function_node __inference_train_function_4711}} ", ""),
    ("Graph execution error:\n\n", "\n\t [[{{node model/dense/MatMul}}]] [Op:__inference_train_function_4711]"),
    ("Exception encountered when calling Activation.call().\n\n{{function_node __wrapped__Sigmoid_device_/job:local"
     "host/replica:0/task:0/device:GPU:0}} ", "\n\nArguments received by Activation.call():\n  • inputs=tf.Tensor()"),
    ("Exception encountered when calling layer 'dense' (type Dense).\n\n", "\n\nCall arguments received by layer"),
]  # fmt: skip
TENSORFLOWS = [
    entry
    for entry in CORPUS["real"]
    if entry["expect"]["requester"] == "tensorflow" and entry["type"].startswith("tensorflow.")
]


@pytest.mark.parametrize(("before", "after"), AROUND)
@pytest.mark.parametrize("entry", TENSORFLOWS, ids=[entry["id"] for entry in TENSORFLOWS])
def test_what_tensorflow_and_keras_put_around_an_error_does_not_hide_it(
    entry: dict[str, Any], before: str, after: str
) -> None:
    """Each of TensorFlow's errors with each wrapping: still the GPU's memory, of the same size, and no less certain."""
    plain, found = classify(facts_of(entry)), classify(facts_of(entry, f"{before}{entry['text']}{after}"))
    assert (found.memory, found.requester, found.requested) == (plain.memory, plain.requester, plain.requested)
    assert found.certain or not plain.certain


@pytest.mark.parametrize("entry", CORPUS["real"], ids=[entry["id"] for entry in CORPUS["real"]])
def test_whoever_only_quotes_an_error_ran_out_of_nothing(entry: dict[str, Any]) -> None:
    """Each real text as a test's own message, a value that was wrong, and what a parser or a shell command quotes."""
    for names in (
        ("builtins.AssertionError", "builtins.Exception"),
        ("builtins.Failed", "_pytest.outcomes.OutcomeException", "builtins.BaseException"),
        ("unittest.case.SkipTest", "builtins.Exception"),
        ("pydantic_core._pydantic_core.ValidationError", "builtins.ValueError", "builtins.Exception"),
        ("configparser.MissingSectionHeaderError", "configparser.ParsingError", "configparser.Error"),
    ):
        found = classify(ErrorFacts(names[0], names, f"expected {entry['text']!r}", {}))
        assert (found.memory, found.certain) == ("none", True), names
    command = f"Command '['grep', {entry['text']!r}]' returned non-zero exit status 1."
    found = classify(ErrorFacts("subprocess.CalledProcessError", SUBPROCESS, command, {}))
    assert found.memory == "none"


SUBPROCESS = ("subprocess.CalledProcessError", "subprocess.SubprocessError", "builtins.Exception")
CERTAIN = [entry for entry in ENTRIES if entry["expect"]["certain"] and "errno" not in entry.get("attributes", {})]


@pytest.mark.parametrize("entry", CERTAIN, ids=[entry["id"] for entry in CERTAIN])
def test_what_is_certain_stays_so_in_the_traceback_of_a_worker(entry: dict[str, Any]) -> None:
    found = classify(wrapped(entry))
    assert (found.memory, found.requested) == (entry["expect"]["memory"], entry["expect"]["requested"])
    assert found.requester == entry["expect"]["requester"]


XLA = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate {:.2f}KiB"
SIZES = [
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate {:.2f} GiB. GPU 0 has a total of 8 GiB", 1 << 30),
    ("torch.OutOfMemoryError", "Allocation on device 3 (out of memory)\nRequested               : {:.2f} MiB", 1 << 20),
    ("jaxlib.xla_extension.XlaRuntimeError", XLA, 1 << 10),
    ("builtins.MemoryError", "bad_alloc: RMM failure at /x: too large (failed to allocate {:.6f} MiB)", 1 << 20),
    ("cupy.cuda.memory.OutOfMemoryError", "Out of memory allocating {:,.0f} bytes (allocated so far: 7 bytes).", 1),
    ("builtins.RuntimeError", "failed to cudaMalloc {:.0f} bytes (error 2 out of memory)", 1),
    ("builtins.RuntimeError", "failed to allocate 9.9G ({:.0f} bytes) from device: CUDA_ERROR_OUT_OF_MEMORY", 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "unit"), SIZES)
@given(number=st.integers(1, 10**7))
def test_any_size_is_read_to_the_digits_it_was_printed_with(kind: str, text: str, unit: int, number: int) -> None:
    digits = re.search(r"\.(\d)f", text)
    places = int(digits[1]) if digits else 0
    value = number / 10**places
    found = classify(ErrorFacts(kind, (kind,), text.format(value), {}))
    assert found.memory == "gpu" and found.certain and found.requested is not None
    assert abs(found.requested - value * unit) <= max(1, 0.5 * unit / 10**places)


@given(shape=st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_a_shape_and_a_type_are_a_size(shape: list[int]) -> None:
    words = f"OOM when allocating tensor with shape[{','.join(map(str, shape))}] and type {{}} on device:GPU:1 by"
    size = 1
    for part in shape:
        size *= part
    for dtype, item in (("half", 2), ("double", 8), ("complex128", 16), ("string", None), ("resource", None)):
        found = classify(ErrorFacts("x.ResourceExhaustedError", (), words.format(dtype), {}))
        assert found.requested == (None if item is None else size * item)


PINNED = "OOM when allocating tensor with shape[2] and type float on device:CPU:0 by allocator gpu_host_bfc"
OTHERS = [  # of the libraries' sources and documents, and in no entry of the corpus
    ("torch.OutOfMemoryError", "Caught OutOfMemoryError in replica 0 on device 0.", "gpu", "torch", True),
    ("builtins.RuntimeError", "CUDA driver error: out of memory", "gpu", "cuda", False),
    ("builtins.RuntimeError", "Unable to find a valid cuDNN algorithm to run convolution", "gpu", "cudnn", False),
    ("builtins.RuntimeError", "NCCL error: Last error:\nCuda failure 2 'out of memory'", "gpu", "nccl", False),
    ("builtins.RuntimeError", "NCCL error: Last error:\nFailed to CUDA host alloc 9 bytes", "pinned", "nccl", True),
    ("x.ResourceExhaustedError", PINNED, "pinned", "tensorflow", True),
    ("memguard.errors.BudgetExceeded", "CUDA out of memory is what it would be", "none", None, True),
    ("memguard._frameworks.simulated.adapter.FrameworkOutOfMemory", "its cap is reached", "gpu", None, True),
    ("builtins.RuntimeError", "cudaHostAlloc of 5 bytes failed: out of memory", "pinned", None, True),
    ("x.ResourceExhaustedError", "{{node model/dense/MatMul}} failed to allocate memory", "gpu", "tensorflow", False),
    # As programs raise them: a ValueError, and a RuntimeError in words of their own.
    ("builtins.ValueError", "CUDA out of memory during upscaling", "none", None, True),
    ("builtins.ValueError", "CUDA out of memory: reduce width/height or steps", "none", None, True),
    ("builtins.ValueError", "expected 'CUDA out of memory' in the log", "none", None, True),
    ("ray.exceptions.RayTaskError(OutOfMemoryError)", "CUDA out of memory. Tried to get 2 GiB", "none", None, True),
    ("builtins.RuntimeError", "CUDA Out of Memory! Try shorter audio files or run on CPU.", "gpu", "torch", False),
    ("builtins.RuntimeError", "expected 'CUDA out of memory', got 'ok'", "gpu", "torch", False),
    ("builtins.RuntimeError", "step 7 failed: CUDA out of memory. Tried to allocate 20.00 MiB", "gpu", "torch", True),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "memory", "requester", "certain"), OTHERS)
def test_texts_that_the_corpus_does_not_have(
    kind: str, text: str, memory: str, requester: str | None, certain: bool
) -> None:
    found = classify(ErrorFacts(kind, (kind,), text, {}))
    assert (found.memory, found.requester, found.certain) == (memory, requester, certain)


def test_no_rule_is_there_for_nothing() -> None:
    """Each is the first to fit some text: an entry of the corpus, or one of those above."""
    known = [*map(facts_of, ENTRIES), *(ErrorFacts(kind, (kind,), text, {}) for kind, text, *_ in OTHERS)]
    first = [next((rule for rule in RULES if rule.match(facts.text, facts.mro)), None) for facts in known]
    assert [rule.why for rule in RULES if rule not in first] == []


def test_a_long_text_is_no_trouble() -> None:
    text = "OOM out of memory Traceback (most recent call last) cuMemAlloc BFCArena NCCL bad_alloc " * 250
    assert classify(ErrorFacts("builtins.RuntimeError", ("builtins.RuntimeError",), text, {})).memory in ("gpu", "none")


# What is not even searched


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["id"] for entry in ENTRIES])
def test_no_text_of_the_corpus_is_passed_over(entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [facts_of(entry), facts_of(entry, entry["text"].swapcase()), wrapped(entry)]
    if entry["expect"]["memory"] == "gpu":
        assert rules._may_match(variants[0])
    quick = [classify(facts) for facts in variants]
    monkeypatch.setattr(rules, "_may_match", lambda facts: True)
    assert quick == [classify(facts) for facts in variants]


def needs_a_stem(pattern: Any) -> bool:
    """Whether whatever the (parsed) pattern fits has a stem in it."""
    run, found = "", False
    for kind, value in [*pattern, (None, None)]:
        if str(kind) == "LITERAL":
            run += chr(value).lower()
            continue
        found, run = found or any(stem in run for stem in rules.STEMS), ""
        if str(kind) == "SUBPATTERN":
            found = found or needs_a_stem(value[-1])
        elif str(kind) == "BRANCH":
            found = found or all(needs_a_stem(choice) for choice in value[1])
        elif str(kind) == "MAX_REPEAT" and value[0] > 0:
            found = found or needs_a_stem(value[2])
    return found


TELLING = [rule for rule in RULES if (rule.memory, rule.certain) != ("none", True)]


@pytest.mark.parametrize("rule", TELLING, ids=[rule.why for rule in TELLING])
def test_what_a_rule_fits_has_a_stem_or_a_type_that_speaks_of_memory(rule: Rule) -> None:
    if rule.text:
        assert needs_a_stem(regex_parser.parse(rule.text))
    else:  # the type alone
        assert "Memory" in rule.type


@given(st.text(), st.sampled_from(ENTRIES), st.text())
def test_nothing_around_it_hides_it(before: str, entry: dict[str, Any], after: str) -> None:
    facts = facts_of(entry, f"{before}{entry['text']}{after}")
    if entry["expect"]["memory"] == "gpu":
        assert rules._may_match(facts)


@pytest.mark.parametrize("words", ["x", "e'", "wrong shape of (3, 4), "])
def test_an_ordinary_error_costs_next_to_nothing(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 0.1 ms where every rule takes 4 ms. (A ValueError is none by its type alone.)"""
    facts = hooks.facts_of(RuntimeError(words * (100_000 // len(words))))

    def fastest() -> float:
        took = []
        for _ in range(50):
            begun = time.perf_counter()
            assert classify(facts).memory == "none"
            took.append(time.perf_counter() - begun)
        return min(took)

    quick = fastest()
    monkeypatch.setattr(rules, "_may_match", lambda facts: True)
    assert quick < fastest() / 10
