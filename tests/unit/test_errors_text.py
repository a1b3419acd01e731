"""The text of each public error, and what a pickle keeps: a worker's error reaches the caller as it was raised."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from memguard import errors

_REFUSAL = "torch needs 3.00 GiB\n      'a' reserved 1\n    fix: less"
_TEXTS: list[tuple[errors.MemguardError, str, dict[str, Any]]] = [
    (errors.MemguardError(), "", {}),
    (errors.MemguardError("it fails"), "it fails", {}),
    (errors.MemguardError("it fails\n    fix: mend it"), "it fails\n    fix: mend it", {}),
    (
        errors.ConfigError(
            [errors.Problem("is no size", "write '2GiB'", 3, 5, "device.limit"), errors.Problem("is empty")], "b.yaml"
        ),
        "b.yaml:3:5: device.limit: is no size\n    fix: write '2GiB'\nb.yaml: is empty",
        {"source": "b.yaml"},
    ),
    (
        errors.PlanError([errors.Problem("fits no GPU", "lower it", None, None, "device")]),
        "budget: device: fits no GPU\n    fix: lower it",
        {"source": "budget"},
    ),
    (errors.ConfigError([]), "", {"problems": ()}),
    (errors.DeviceError("no GPU\n    fix: buy one", missing=True), "no GPU\n    fix: buy one", {"missing": True}),
    (
        errors.CapNotApplied("torch", "it is live", "import it later"),
        "torch: cap not applied: it is live\n    fix: import it later",
        {"framework": "torch", "reason": "it is live", "remedy": "import it later"},
    ),
    (
        errors.ConflictingSetting("jax", "XLA_FLAGS", "is looser", "unset it"),
        "jax: cap not applied: XLA_FLAGS is looser\n    fix: unset it",
        {"setting": "XLA_FLAGS", "reason": "XLA_FLAGS is looser", "remedy": "unset it"},
    ),
    (
        errors.BudgetExceeded("torch", 3 << 30, 1 << 30, _REFUSAL),
        "torch needs 3.00 GiB\n      'a' reserved 1\n    fix: less",
        {"framework": "torch", "needed": 3 << 30, "available": 1 << 30},
    ),
    (
        errors.LeaseRefused("no room\n    fix: wait", [{"pid": 7}]),
        "no room\n    fix: wait",
        {"holders": ({"pid": 7},)},
    ),
    (
        errors.UnderPressure("torch", "GPU-1", "torch is near its cap"),
        "torch is near its cap\n    fix: free arrays, or take 'raise' out of on_pressure in the budget",
        {"framework": "torch", "uuid": "GPU-1", "args": ("torch", "GPU-1", "torch is near its cap")},
    ),
    (
        errors.CannotShare("torch", "jax", "it is sparse", "make it dense"),
        "torch to jax: cannot share this array: it is sparse\n    fix: make it dense",
        {"reason": "it is sparse", "remedy": "make it dense", "copied": False},
    ),
    (
        errors.CannotShare("torch", None, "it is sparse", "make it dense", True),
        "torch: cannot copy this array: it is sparse\n    fix: make it dense",
        {"consumer": None, "copied": True},
    ),
    (
        errors.CannotSuspend([("a", "it computes", "wait"), ("b", "it is shared", "close it")]),
        "cannot suspend: it computes\n    fix: wait\ncannot suspend: it is shared\n    fix: close it",
        {"reasons": (("a", "it computes", "wait"), ("b", "it is shared", "close it"))},
    ),
    (errors.CannotResume("it stays\n    fix: resume", lost=True), "it stays\n    fix: resume", {"lost": True}),
    (errors.Suspended("it is off"), "it is off", {}),
    (errors.NotActive("no budget"), "no budget", {}),
    (errors.AlreadyActive("another"), "another", {}),
    (errors.FactsError("no facts"), "no facts", {"exit_code": 2}),
    (errors.TraceError("no trace"), "no trace", {"exit_code": 2}),
    (errors.TimelineError("no timeline"), "no timeline", {"exit_code": 2}),
]


@pytest.mark.parametrize(("error", "text", "fields"), _TEXTS, ids=lambda value: type(value).__name__)
def test_the_text_and_the_fields_survive_a_pickle(
    error: errors.MemguardError, text: str, fields: dict[str, Any]
) -> None:
    for one in (error, copy.copy(error), *(pickle.loads(pickle.dumps(error, n)) for n in range(6))):
        assert type(one) is type(error) and str(one) == text and one.args == error.args
        assert {name: getattr(one, name) for name in fields} == fields


def test_every_public_error_is_here() -> None:
    public = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {type(error) for error, _, _ in _TEXTS} == public - {errors.ProblemsError}
