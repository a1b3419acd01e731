"""Versions as numbers: of the driver, of its CUDA, and of the CUDA that a framework was built for."""

from __future__ import annotations

import re

from memguard._tools.doctor.facts import Facts, FrameworkFacts

Version = tuple[int, ...]


def numbers(text: str | None) -> Version:
    """`580.159.04` as numbers; empty if there are none."""
    found = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def cuda_of_driver(facts: Facts) -> Version:
    """The driver's CUDA: (13, 0). From libcuda first, which may differ from NVML (cuda-compat)."""
    number = facts.driver.cuda.version or facts.driver.nvml.cuda
    return (number // 1000, number % 1000 // 10) if number else ()


def cuda_of(framework: FrameworkFacts) -> Version:
    """The CUDA that it was built for, as two numbers; empty if unknown or not built for CUDA."""
    return numbers(framework.cuda)[:2] if framework.gpu is not False else ()


def libcuda_version(facts: Facts) -> Version:
    """The driver's version in the name of libcuda's file; under WSL the name has none."""
    found = re.search(r"libcuda\.so\.(\d{3,}(?:\.\d+)+)$", facts.driver.cuda.path or "")
    return numbers(found.group(1)) if found else ()


def compat(facts: Facts) -> bool:
    """Whether the loaded libcuda is from a cuda-compat package."""
    return re.search(r"/compat/|/cuda-compat", facts.driver.cuda.path or "") is not None
