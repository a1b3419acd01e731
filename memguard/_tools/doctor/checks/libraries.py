"""CUDA's libraries: those that a framework was built for, compared with those that its process has mapped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import combinations

from memguard._tools.doctor.checks import import_order
from memguard._tools.doctor.cuda_libraries import Mapped, by_stem, major, parse
from memguard._tools.doctor.derived import (
    by_library,
    did_not_finish,
    mapped,
    messages,
    modules,
    no_gpu,
    not_opened,
    without_cuda,
)
from memguard._tools.doctor.facts import Facts, FrameworkFacts, Probe, Process, once
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import built_for, full_name, install_libraries, listing, pip_packages, shortened

# Each NVRTC opens the builtins of its own version: a second copy does no harm.
_NO_STATE = frozenset({"libnvrtc-builtins"})
# Compilers keep their state in the caller's handles: a second copy only costs memory.
_COMPILERS = frozenset({"libnvrtc", "libnvJitLink", "libnvvm", "libnvfatbin"})
_TENSORFLOW_SAYS = "Cannot dlopen some GPU libraries"


def _wanted(facts: Facts, framework: str) -> int | None:
    """The CUDA major that the framework was built for: as it reports, or by the name or version of its package."""
    found = facts.frameworks[framework]
    if (built := major(found.cuda)) is not None:
        return built
    dists = (*found.distributions, *(name for name in facts.packages if name.startswith(f"{framework}-cuda")))
    match = re.search(r"\+cu(\d\d)", found.version or "") or re.search(r"-cuda(\d\d)", " ".join(dists))
    return int(match.group(1)) if match else None


def absent(facts: Facts, framework: str) -> tuple[str, ...]:
    """The CUDA libraries that the framework could not open."""
    found = facts.frameworks[framework]
    named = tuple(name for name in found.missing if parse(name) is not None)
    return named or tuple(dict.fromkeys(name for _, name in not_opened(found) if parse(name) is not None))


def without_libraries(facts: Facts, framework: str) -> bool:
    """Whether the framework lacks CUDA libraries. TensorFlow's message says so without naming them."""
    texts = messages(facts.frameworks[framework].probe)
    return bool(absent(facts, framework)) or any(_TENSORFLOW_SAYS in text for text in texts)


@check("library-missing", order=305)
def library_missing(facts: Facts) -> Iterator[Found]:
    for name, found in facts.frameworks.items():
        if found.probe is None or not without_libraries(facts, name):
            continue
        at_import = any(stage.error is not None and stage.name == "import" for stage in found.probe.stages)
        if no_gpu(facts) and not at_import:
            continue  # without a GPU the libraries are of no use
        if name == "numba" and without_cuda(facts, name):
            continue  # `cpu-build` reports the missing package numba-cuda
        names, wanted = absent(facts, name), _wanted(facts, name)
        what = listing(names) if names else "CUDA libraries that its message does not name"
        packages = pip_packages(names, wanted)
        lines = [line.strip() for text in messages(found.probe) for line in text.splitlines()]
        reported = {line for line, lib in not_opened(found) if parse(lib) is not None}
        evidence = [line for line in lines if line in reported or _TENSORFLOW_SAYS in line]
        fails = did_not_finish(found.probe) or found.gpus == 0
        sees = "" if fails else "; it works without"
        yield Found(
            f"{full_name(facts, name)} could not open {what}"
            + (f", which {listing(packages)} would install" if packages else "")
            + sees,
            shortened([f"{name}: {line}" for line in evidence] or [f"{name} could not open {lib}" for lib in names]),
            install_libraries(facts, name, wanted, names),
            name,
            severity=Severity.ERROR if fails else Severity.INFO,
        )


@once
def _wrong_cuda(found: FrameworkFacts) -> tuple[Mapped, ...]:
    """Mapped libraries for another CUDA than the framework's, unless the process has mapped the right one too."""
    built = major(found.cuda)
    if built is None or found.probe is None:
        return ()
    return tuple(
        file
        for files in by_library(found.probe).values()
        if not any(not file.majors or built in file.majors for file in files)
        for file in files
    )


@check("library-wrong-major", order=310)
def library_wrong_major(facts: Facts) -> Iterator[Found]:
    for name, found in facts.frameworks.items():
        files = _wrong_cuda(found)
        if not files or found.probe is None:
            continue
        runs_with = listing(file.library.stem for file in files)
        kinds = listing(sorted({file.of for file in files}))
        also = [
            f"it has loaded {listing(file.name for file in group)}"
            for group in by_library(found.probe).values()
            if _disjoint(group)
        ]
        twice = [f"two copies: {first.path} and {second.path}" for first, second in _copies(found.probe)]
        folders = _searched(facts, files)
        yield Found(
            f"{full_name(facts, name)} was built for CUDA {found.cuda} and runs with {runs_with} of {kinds}, "
            "whose functions may differ",
            (
                built_for(facts, name),
                *shortened([f"{name} has mapped {file.path} ({file.of})" for file in files]),
                *also,
                *twice,
            ),
            install_libraries(facts, name, major(found.cuda), (file.library.stem + ".so" for file in files))
            + (f", with {listing(folders)} out of LD_LIBRARY_PATH" if folders else ""),
            name,
            severity=Severity.ERROR if did_not_finish(found.probe) else Severity.WARNING,
        )


def _searched(facts: Facts, files: Iterable[Mapped]) -> list[str]:
    """The folders of these files that are in LD_LIBRARY_PATH."""
    named = {folder.rstrip("/") for folder in facts.environment.get("LD_LIBRARY_PATH", "").split(":") if folder}
    return sorted({file.folder for file in files} & named)


def _disjoint(files: Iterable[Mapped]) -> bool:
    return any(a.majors and b.majors and not a.majors & b.majors for a, b in combinations(files, 2))


@once
def _copies(process: Probe | Process) -> list[tuple[Mapped, Mapped]]:
    """Pairs of mapped files that are copies of one library for one CUDA.

    In a process with two CUDAs, a file name that both use (libcusparse.so.12) is no evidence of a copy.
    """
    groups = by_stem(sorted(mapped(process), key=lambda file: file.path))
    two_cudas = any(map(_disjoint, groups.values()))
    return [
        (first, second)
        for stem, files in groups.items()
        if stem not in _NO_STATE
        for first, second in combinations(files, 2)
        if first.majors & second.majors or not first.majors
        if not two_cudas or len(first.majors & second.majors) == 1
    ]


def _processes(facts: Facts) -> Iterator[tuple[str, Probe | Process]]:
    """The processes by name: each framework alone, then several together, then the process that called the doctor."""
    yield from facts.probes()
    if facts.process is not None:
        yield "this process", facts.process


def _members(facts: Facts, process: str) -> list[str]:
    """The frameworks that run in this process."""
    if process == "this process":
        return [name for name in facts.frameworks if name in modules(facts)]
    return process.split(" then ")


@check("library-twice", order=315)
def library_twice(facts: Facts) -> Iterator[Found]:
    """A library is mapped from two files: one finding for each pair of folders. Skips `library_wrong_major`'s files."""
    wrong = {name: {file.path for file in _wrong_cuda(found)} for name, found in facts.frameworks.items()}
    found_in: dict[tuple[str, str], dict[str, list[tuple[Mapped, Mapped]]]] = {}
    for name, process in _processes(facts):
        reported = {path for member in _members(facts, name) for path in wrong.get(member, ())}
        for first, second in _copies(process):
            if first.path not in reported and second.path not in reported:
                folders = (min(first.folder, second.folder), max(first.folder, second.folder))
                found_in.setdefault(folders, {}).setdefault(name, []).append((first, second))
    for folders, where in found_in.items():
        subjects = [name for name in where if name in facts.frameworks]
        first_seen = subjects[0] if subjects else next(iter(where))
        yield _loaded_twice(facts, folders, where[first_seen], first_seen, subjects)


def _loaded_twice(
    facts: Facts, folders: tuple[str, str], pairs: list[tuple[Mapped, Mapped]], where: str, subjects: list[str]
) -> Found:
    renamed = all(first.renamed or second.renamed for first, second in pairs)
    compilers = all(first.library.stem in _COMPILERS for first, _ in pairs)
    members = _members(facts, where)
    into = listing(subjects) if subjects else f"a process of {listing(members)}" if " then " in where else where
    variables = [
        f"{folder} out of {name}"
        for folder in dict.fromkeys(folders)
        for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")
        if not folder.endswith("/nvidia/cu13/lib") and folder in facts.environment.get(name, "")
    ]
    if renamed:
        why, remedy = "a package has its own copy under another name, so they do not mix", "nothing to do"
    elif compilers:
        why, remedy = "each is called only by the library that loaded it", "nothing to do"
    else:
        why = "the state of one copy is unknown to the other"
        packages = sorted({name for first, _ in pairs for name in _installed(facts, first)})
        remedy = f"take {listing(variables)}" if variables else "keep one of them: uninstall the other's package"
        remedy += f" (pip show -f {' '.join(packages)} lists its files)" if packages and not variables else ""
    return Found(
        f"{listing(first.library.stem for first, _ in pairs)} is loaded twice into {into}, from "
        f"{listing(folders)}: {why}",
        (
            *shortened([f"{where} has mapped {file.path}" for pair in pairs for file in pair]),
            *(f"{name} names it (environment)" for name in ("LD_PRELOAD",) if any(name in item for item in variables)),
        ),
        remedy,
        ", ".join(subjects or members) or where,
        severity=Severity.INFO if renamed or compilers else Severity.WARNING,
    )


def _installed(facts: Facts, file: Mapped) -> Iterator[str]:
    """The installed pip packages that contain a library of this name."""
    for number in sorted(file.majors):
        if (name := file.library.pip(number)) in facts.packages:
            yield name


@check("cuda-majors-mixed", order=320)
def cuda_majors_mixed(facts: Facts) -> Iterator[Found]:
    """Libraries of two CUDA majors in one process: of one framework, or of several if no other finding explains it."""
    explained: set[str] = set()
    alone: dict[tuple[Mapped, ...], list[str]] = {}
    for name, found in facts.frameworks.items():
        built = major(found.cuda)
        wrong = {file.path for file in _wrong_cuda(found)}
        explained |= wrong
        if wrong or built is None or found.probe is None:
            continue
        strangers = tuple(
            file
            for files in by_library(found.probe).values()
            if _disjoint(files)
            for file in files
            if built not in file.majors
        )
        if strangers:
            alone.setdefault(strangers, []).append(name)
    for strangers, names in alone.items():
        explained |= {file.path for file in strangers}
        yield _mixed_alone(facts, strangers, names)
    if import_order.witness(facts) is not None:
        return  # `import-order` reports the same conflict with its effect
    seen: set[tuple[int, ...]] = set()
    for name, process in _processes(facts):
        rest = [file for file in mapped(process) if file.path not in explained]
        files = [file for group in by_stem(rest).values() if _disjoint(group) for file in group]
        kinds = tuple(sorted({number for file in files if len(file.majors) == 1 for number in file.majors}))
        if name in facts.frameworks or not files or kinds in seen:
            continue
        seen.add(kinds)
        yield _mixed_together(facts, name, files, kinds)


def _mixed_alone(facts: Facts, files: tuple[Mapped, ...], names: list[str]) -> Found:
    stems = listing(file.name for file in files)
    packages = {package: facts.packages[package] for file in files for package in _installed(facts, file)}
    lines = [f"{name} has mapped {file.path}" for name in names for file in files]
    right = [device.multiprocessors for device in facts.driver.cuda.devices][:1]
    counts = {name: found[:1] for name in names if (found := facts.frameworks[name].multiprocessors)}
    misread = [f"{name} counts {count[0]} multiprocessors" for name, count in counts.items() if [*count] != right]
    return Found(
        f"{stems} ({listing(file.of for file in files)}) is loaded into {listing(names)}, built for CUDA "
        f"{listing(sorted({str(major(facts.frameworks[name].cuda)) for name in names}))}: "
        "a call may reach the wrong one",
        (
            *(built_for(facts, name) for name in names),
            *shortened(lines),
            *(f"{line}, the driver {right[0]}" for line in misread if right),
            *(f"{package} {version} is installed" for package, version in packages.items()),
        ),
        f"pip uninstall {' '.join(packages)} if nothing else needs it, or use an environment for each"
        if packages
        else f"keep {listing(file.folder for file in files)} out of the paths of this Python",
        ", ".join(names),
        severity=Severity.ERROR if right and misread else Severity.WARNING,
    )


def _mixed_together(facts: Facts, name: str, files: list[Mapped], kinds: tuple[int, ...]) -> Found:
    groups: dict[int, list[str]] = {}
    for framework in _members(facts, name):
        built = major(facts.frameworks[framework].cuda) if framework in facts.frameworks else None
        if built is not None:
            groups.setdefault(built, []).append(framework)
    fewest = min((names for _, names in sorted(groups.items())), key=len) if len(groups) > 1 else []
    who = " beside ".join(f"{listing(names)} for CUDA {built}" for built, names in sorted(groups.items()))
    return Found(
        f"{who or name} in one process: libraries of CUDA {listing(map(str, kinds))} are loaded, "
        "so there are two CUDA runtimes, each with its memory and state",
        (
            *(built_for(facts, framework) for names in groups.values() for framework in names),
            *shortened([f"{file.path} ({file.of})" for file in files]),
        ),
        "install builds for one CUDA major, or run them in separate processes",
        ", ".join(fewest) or name,
    )
