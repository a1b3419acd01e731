"""The main job: TensorFlow, PyTorch and PyCUDA at their caps under 40 GiB. Runs after the tests of all six."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.at_caps import at_the_caps
from support.driving import GIB, MAIN


def test_three_frameworks_stop_at_their_caps(run: Callable[..., dict[str, Any]]) -> None:
    code = "from support import driving\nresult.update(driving.together(driving.MAIN, again=False))\n"
    found = run(code, env={"TF_CPP_MIN_LOG_LEVEL": "0"}, timeout=240, sampled=True)
    assert sum(found["caps"].values()) >= 37 * GIB and set(found["driven"]) == set(MAIN)
    assert set(found["emptied"]) == {"torch", "pycuda"}
    fitted = [r["refused_bytes"] for r in found["driven"]["torch"]["refusals"] if r["would_have_fitted"] is not False]
    assert not fitted, ("PyTorch's segment would have fitted", fitted[:3])
    assert found["churn"]["allocated"] >= 1000 and found["churn"]["refused"] >= 100
    at_the_caps(found, 2)
