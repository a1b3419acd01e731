"""The files in configs/: each has a plan on the GPUs that its text names, and docs/configs.md quotes its every line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memguard._base.units import GIB
from memguard._budget import FRAMEWORKS, load, policy, shared_pool
from memguard._devices.catalog import CATALOGUE
from memguard._devices.simulated import SimulatedHost
from memguard.errors import PlanError

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").iterdir())
DOCUMENT = (ROOT / "docs" / "configs.md").read_text(encoding="utf-8")

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def sections() -> dict[str, str]:
    """The text under each heading of the second level, by what stands in the heading."""
    parts = re.split(r"^## (.+)\n", DOCUMENT, flags=re.MULTILINE)[1:]
    assert len(set(parts[::2])) == len(parts[::2]), "a file has two sections"
    return dict(zip(parts[::2], parts[1::2], strict=True))


def section(path: Path) -> str:
    return sections()[f"`{path.name}`"]


def lines_of(path: Path) -> list[str]:
    """What is neither blank nor a comment, without its indentation."""
    bare = [re.sub(r"(^|\s)#.*", "", line).strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in bare if line]


def explained(text: str) -> list[tuple[str, str]]:
    """The lines that a section quotes, with what it says to each."""
    return re.findall(r"^- `([^`]+)`:((?: .+\n?)+)", text, flags=re.MULTILINE)


def fits(text: str) -> set[str]:
    """The GPUs that a section says its file fits."""
    found = re.findall(r"^Fits: (.+)\.$", text, flags=re.MULTILINE)
    assert len(found) == 1
    return set(CATALOGUE) if found[0] == "all" else set(found[0].split(", "))


def test_there_is_a_section_for_each_file_and_a_file_for_each_section() -> None:
    assert sorted(sections()) == [f"`{path.name}`" for path in FILES]


@every_file
def test_every_line_is_quoted_in_order_and_nothing_else(path: Path) -> None:
    assert [line for line, _ in explained(section(path))] == lines_of(path)


@every_file
def test_every_quoted_line_is_explained(path: Path) -> None:
    for line, said in explained(section(path)):
        assert len(said.split()) >= 3, line


@every_file
def test_a_section_lists_nothing_but_lines(path: Path) -> None:
    text = section(path)
    assert len(re.findall(r"^\s*[-*] ", text, flags=re.MULTILINE)) == len(explained(text))


@every_file
@pytest.mark.parametrize("gpu", CATALOGUE)
def test_it_has_a_plan_exactly_on_the_gpus_that_its_section_names(path: Path, gpu: str) -> None:
    budget = load(path)
    host = SimulatedHost([gpu])
    if gpu not in fits(section(path)):
        assert not isinstance(budget.device.limit, str) and budget.device.limit > host.devices()[0].usable
        with pytest.raises(PlanError):
            policy.plan(budget, host.devices())
        return
    (part,) = policy.plan(budget, host.devices()).devices
    assert list(part.caps) == list(budget.frameworks)
    assert part.limit == part.reserve + sum(shared_pool.caps_of(part).values()) + part.unallocated


@every_file
def test_every_gpu_that_a_section_names_is_known_and_the_h200_is_one(path: Path) -> None:
    assert "h200" in fits(section(path)) <= set(CATALOGUE)


@pytest.mark.parametrize("name", ["all-six.yaml", "shared-card.yaml"])
def test_what_a_part_comes_to_is_about_what_the_text_says(name: str) -> None:
    path = ROOT / "configs" / name
    (part,) = policy.plan(load(path), SimulatedHost(["h200"]).devices()).devices
    compared = 0
    for line, said in explained(section(path)):
        about = re.match(r" about ([\d.]+) GiB", said)
        if about is not None:
            assert part.caps[line.partition(":")[0]] / GIB == pytest.approx(float(about[1]), rel=0.05)
            compared += 1
    assert compared >= 2


@every_file
def test_it_is_short_and_begins_with_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert len(text.splitlines()) <= 25
    assert max(map(len, text.splitlines())) <= 120


def test_the_files_show_every_framework_and_every_setting() -> None:
    budgets = [load(path) for path in FILES]
    assert {name for budget in budgets for name in budget.frameworks} == set(FRAMEWORKS)
    assert any(set(budget.frameworks) == set(FRAMEWORKS) for budget in budgets)
    assert {budget.on_busy for budget in budgets} == {"warn", "raise"}
    assert any(framework.nccl for budget in budgets for framework in budget.frameworks.values())
    written = " ".join(line for path in FILES for line in lines_of(path))
    for key in ("reserve:", "devices:", "share:", "limit:", "growth:", "nccl:", "on_busy:"):
        assert key in written


@pytest.mark.parametrize(
    ("name", "gpu", "jobs"),
    [
        ("shared-card.yaml", "l4", 3),
        ("shared-card.yaml", "rtx4090", 3),
        ("shared-card.yaml", "t4", 2),
        ("all-six.yaml", "l40s", 1),
        ("all-six.yaml", "h100", 1),
        ("all-six.yaml", "h200", 3),
    ],
)
def test_as_many_such_processes_share_a_gpu_as_the_text_says(name: str, gpu: str, jobs: int) -> None:
    limit = load(ROOT / "configs" / name).device.limit
    assert SimulatedHost([gpu]).devices()[0].usable // limit == jobs
