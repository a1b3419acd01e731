"""From a snapshot to the lines of the screen: texts with the names of their styles. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memguard._node.top.snapshot import Gpu, Listed, Share, Snapshot, Target, off, present
from memguard._tools.top.bars import ASCII, BLOCKS, Signs, card_bar, framework_bar
from memguard._tools.top.texts import UNKNOWN, ago, clean, clock, cut, gib, in_ascii, left, right, wrapped

LEAST = 60
"""Columns: on a narrower screen the lines are cut."""
_NAME, _NUMBER, _LEVEL = 12, 8, 10
_LISTED = 8
"""Other processes of a GPU that are listed."""
_ANSWER = 8
"""Lines of an answer: a reason and a remedy fit."""
_NOBODY = (
    "no process here lets memguard top watch it: a budget does with 'monitor: {top: true}'. A timeline can be "
    "followed: memguard top run-PID-RANK.jsonl"
)
_STATES = {
    "silent": "says nothing",
    "ended": "has ended: nobody writes the file",
    "missing": "waiting for the file",
    "unreadable": "cannot be read",
    "suspended": "suspended",
}
_MARKS = {"warn": "! ", "critical": "!!"}
FILLS = {"overhead": "▓", "unaccounted": "▓", "others": "░", "reserve": "░"}
_ASCII_FILLS = {"overhead": "%", "unaccounted": "%", "others": "x", "reserve": "x"}


class Span(NamedTuple):
    """`style`: a name for `app.STYLES`; empty for none."""

    text: str
    style: str = ""


class Key(NamedTuple):
    """What a line is about, for the keys `t` and `c`: a process, or one framework of it."""

    target: str
    uuid: str | None = None
    framework: str | None = None


class Line(NamedTuple):
    spans: tuple[Span, ...]
    key: Key | None = None

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


class View(NamedTuple):
    """`head` stays at the top, `body` scrolls, `events` are newest last."""

    head: Line
    body: tuple[Line, ...]
    events: tuple[Line, ...]

    @property
    def keys(self) -> tuple[Key, ...]:
        """What can be selected, from top to bottom."""
        return tuple(line.key for line in self.body if line.key is not None)


def view(
    snapshot: Snapshot,
    width: int,
    *,
    ascii_only: bool = False,
    selected: Key | None = None,
    reclaimable: bool = False,
) -> View:
    """Everything, for a screen of `width` columns. `reclaimable`: with that column, as `--once` has it."""
    width = max(width, LEAST)
    signs = ASCII if ascii_only else BLOCKS
    body: list[Line] = []
    for number, gpu in enumerate(snapshot.gpus):
        body += [Line(())] if number else []
        body += _gpu(snapshot, gpu, width, signs, selected, reclaimable)
    body += _elsewhere(snapshot, width)
    for note in _notes(snapshot):
        body += [Line((Span(line, "note"),)) for line in wrapped(f"note: {clean(note)}", width, 3)]
    found = View(_head(snapshot, width), tuple(body), tuple(_events(snapshot, width)))
    return _ascii(found) if ascii_only else found


def _ascii(found: View) -> View:
    def line(one: Line) -> Line:
        return Line(tuple(Span(in_ascii(span.text), span.style) for span in one.spans), one.key)

    return View(line(found.head), tuple(map(line, found.body)), tuple(map(line, found.events)))


def plain(found: View) -> list[str]:
    """Lines for `--once`."""
    events = [line.text for line in found.events]
    return [line.rstrip() for line in (found.head.text, *(line.text for line in found.body), *events)]


def _head(snapshot: Snapshot, width: int) -> Line:
    simulated = any(gpu.simulated for gpu in snapshot.gpus)
    what = "this machine" if snapshot.machine else ", ".join(target.name for target in snapshot.targets)
    what += " (simulated GPUs)" if simulated else ""
    time = clock(snapshot.time)
    return Line((Span(left(f"memguard top  {clean(what)}", width - len(time) - 1), "title"), Span(f" {time}", "title")))


# one GPU


def _gpu(
    snapshot: Snapshot, gpu: Gpu, width: int, signs: Signs, selected: Key | None, reclaimable: bool
) -> Iterator[Line]:
    number = "GPU ?" if gpu.index is None else f"GPU {gpu.index}"
    name = left(f"{number} {clean(gpu.name)}", width - 44)
    used = f"{gib(gpu.used)} used, {gib(gpu.free)} free of {gib(gpu.total)} GiB"
    yield Line((Span(name, "gpu"), Span(right(used, 44), "gpu")))
    here = [(target, share) for target in snapshot.targets for share in target.shares if share.uuid == gpu.uuid]
    bar = _card(gpu, _present(snapshot, gpu), width - 3, signs)
    yield Line((Span(" "), *bar))
    for target, share in here:
        yield from _share(target, share, gpu, width, signs, selected, reclaimable, snapshot.time)
    others = UNKNOWN if gpu.others is None else f"{gib(gpu.others)} GiB"
    listed = _listed(snapshot, gpu)
    unified = ": NVML has no figures of unified memory" if gpu.unified and gpu.others is None else ""
    yield Line((Span(f"  {left('other processes', 16)} {others}{unified}", "others"),))
    for one in listed[:_LISTED]:
        yield Line((Span(cut(_process(one, gpu.uuid, snapshot.time), width), "others"),))
    if len(listed) > _LISTED:
        yield Line((Span(f"    and {len(listed) - _LISTED} more: memguard ps", "others"),))


def _present(snapshot: Snapshot, gpu: Gpu) -> list[tuple[Target, Share]]:
    """Whose figures belong to the GPU's: NVML reads this machine's now, a simulated one is read by its process."""
    return present(gpu.uuid, snapshot.targets, snapshot.time if snapshot.machine and not gpu.simulated else None)


def _card(gpu: Gpu, here: Sequence[tuple[Target, Share]], width: int, signs: Signs) -> list[Span]:
    """The whole card. What is negative or unknown takes no place in it."""
    if gpu.used is None and not here:
        return [Span(left("what is used is unknown", width), "note")]
    sizes: list[tuple[str, int]] = []
    for target, share in here:
        if off(target, share):
            continue
        for part in share.frameworks:
            sizes.append((clean(part.name), part.held if part.held is not None else part.at_least or part.in_use or 0))
        sizes += [("overhead", share.overhead or 0), ("unaccounted", max(share.unaccounted or 0, 0))]
    sizes += [("others", max(gpu.others or 0, 0)), ("reserve", gpu.reserved or 0)]
    fills = _ASCII_FILLS if signs is ASCII else FILLS
    pieces = card_bar(sizes, gpu.total, width, signs, fills, "unknown" if gpu.free is None else "free")
    return [Span("["), *(Span(text, f"part:{role}") for text, role in pieces), Span("]")]


def _share(
    target: Target,
    share: Share,
    gpu: Gpu,
    width: int,
    signs: Signs,
    selected: Key | None,
    reclaimable: bool,
    now: float,
) -> Iterator[Line]:
    key = Key(target.key, share.uuid)
    who = clean(target.name) if target.pid is None else f"PID {target.pid} {clean(target.name)}"
    limit = "" if share.limit is None else f" of limit {gib(share.limit)}"
    if off(target, share):
        size = UNKNOWN if share.suspended is None else f"{gib(share.suspended)} GiB"
        sizes = f"suspended, {size} in host memory"
    else:
        sizes = f"{gib(share.process)}{limit} GiB"
    tail = f"{_state(target, now)}{sizes}  {right(_level(share.level), _LEVEL)}"
    mark = _cursor(key, selected)
    room = max(width - len(tail) - 3, 8)
    style = _style("target", key, selected)
    yield Line(
        (Span(f"{mark}{left(who, room)} {tail}"[:width] if len(tail) < width else cut(tail, width), style),), key
    )
    columns = ("held", "cap", "in use", "cached", *(("reclaim",) if reclaimable else ()))
    bar = width - 2 - _NAME - len(columns) * _NUMBER - _LEVEL - 3
    heads = "".join(right(text, _NUMBER) for text in columns)
    yield Line((Span(f"  {left('GiB', _NAME)} {' ' * bar} {heads} {right('pressure', _LEVEL)}", "head"),))
    scale = share.limit or gpu.total
    for part in share.frameworks:
        key = Key(target.key, share.uuid, part.name)
        style = _style("", key, selected)
        pieces = framework_bar(part.held, part.in_use, part.at_least, part.cap, scale, bar, signs)
        role = clean(part.name)
        held = gib(part.held)
        if part.held is None and part.at_least is not None:
            held = f"{'>=' if signs is ASCII else '≥'}{gib(part.at_least)}"
        cells = (held, _cap(part.cap), gib(part.in_use), gib(part.cached), gib(part.returnable))
        numbers = "".join(right(text, _NUMBER) for text in cells[: len(columns)])
        yield Line(
            (
                Span(f"{_cursor(key, selected)}{left(role, _NAME)} ", style or f"name:{role}"),
                *(Span(text, f"{kind}:{role}" if kind in ("used", "cached") else kind) for text, kind in pieces),
                Span(f" {numbers} ", style),
                Span(right(_level(part.level), _LEVEL), f"level:{part.level}" if part.level else style),
            ),
            key,
        )
    for label, what in (("overhead", share.overhead), ("unaccounted", share.unaccounted)):
        yield Line((Span(f"  {left(label, _NAME)} {' ' * bar} {right(gib(what), _NUMBER)}", "small"),))
    for forecast in share.forecasts:
        who = f"{clean(forecast.framework)} reaches its cap" if forecast.framework else "the process reaches its limit"
        left_over = forecast.at - now
        when = f"in about {left_over:.0f} s" if left_over >= 1 else "about now"
        yield Line((Span(cut(f"  forecast: {who} {when}", width), "forecast"),))
    for request in target.requests:
        answer = f": {clean(request.answer)}" if request.answer else ""
        state: str = request.state
        if state == "waiting":
            ended = target.state == "ended"  # or its budget: nobody is left to do it
            state = "not done: it has ended" if ended else "waiting (at its next memguard.checkpoint())"
        text = f"asked: {clean(request.what)}: {state}{answer}"
        for number, line in enumerate(wrapped(text, width - 4, _ANSWER)):
            yield Line((Span(f"{'    ' if number else '  '}{line}", f"request:{request.state}"),))


def _cap(cap: int | None) -> str:
    return "none" if cap is None else gib(cap)


def _state(target: Target, now: float) -> str:
    """What is to say before its figures: nothing while it is live."""
    if target.state in ("live", "suspended"):
        return ""
    since = "" if target.read is None else f" for {ago(now - target.read)}" if target.state == "silent" else ""
    short = {"silent": f"silent{since}", "ended": f"ended at {clock(target.read)}"}
    return f"{short.get(target.state, target.state)}; "


def _level(level: str | None) -> str:
    return UNKNOWN if level is None else f"{_MARKS.get(level, '')}{clean(level)}"


def _cursor(key: Key, selected: Key | None) -> str:
    return "> " if key == selected else "  "


def _style(style: str, key: Key, selected: Key | None) -> str:
    return "selected" if key == selected else style


# beside the GPUs' own figures


def _listed(snapshot: Snapshot, gpu: Gpu) -> list[Listed]:
    """Processes that `top` does not ask itself, most first."""
    told = {target.pid for target in snapshot.targets if target.file is None}
    found = [one for one in snapshot.processes if gpu.uuid in one.bytes and one.pid not in told]
    return sorted(found, key=lambda one: (one.state != "running", -(one.bytes[gpu.uuid] or 0), one.pid))


def _process(one: Listed, uuid: str | None, now: float) -> str:
    size = one.bytes.get(uuid) if uuid is not None else None
    state = ""
    if one.state != "running":
        since = "" if one.since is None else f" for {ago(now - one.since)}"
        state = f"{clean(one.state)}{since}  "
    who = f"PID {one.pid} {clean(one.user or UNKNOWN)}  {clean(one.command or UNKNOWN)}"
    return f"    {right(gib(size), 8)}  {state}{who}"


def _elsewhere(snapshot: Snapshot, width: int) -> Iterator[Line]:
    """Targets and processes that are on none of the GPUs shown."""
    for target in snapshot.targets:
        if not target.shares:
            pid = "" if target.pid is None else f"PID {target.pid} "
            said = _STATES.get(target.state, "no reading yet")
            yield Line((Span(cut(f"{pid}{clean(target.name)}: {said}", width), "target"),))
    shown = {gpu.uuid for gpu in snapshot.gpus}
    for one in snapshot.processes:
        if one.state != "running" and not shown & set(one.bytes):
            yield Line((Span(cut(_process(one, None, snapshot.time), width), "others"),))
    if snapshot.machine and not snapshot.targets:
        for line in wrapped(_NOBODY, width, 2):
            yield Line((Span(line, "note"),))


def _notes(snapshot: Snapshot) -> list[str]:
    notes = [*snapshot.notes]
    for target in snapshot.targets:
        if target.shares and target.state in ("ended", "silent"):
            ended = target.state == "ended"
            cards = [gpu for gpu in snapshot.gpus if any(share.uuid == gpu.uuid for share in target.shares)]
            if target.file is None:
                said = "it, or its budget, has ended" if ended else "it lives, and does not answer"
            else:
                said = "nobody writes it any more" if ended else "its process lives and writes nothing"
            past = bool(cards) and not any(target is one for gpu in cards for one, _ in _present(snapshot, gpu))
            apart = ", and not in the GPU's bar, which is later" if past else ""
            notes.append(f"{target.name}: {said}; the figures are those of {clock(target.read)}{apart}")
        notes += target.notes
    return list(dict.fromkeys(notes))


def _events(snapshot: Snapshot, width: int) -> list[Line]:
    """Of all targets, the newest last."""
    several = len(snapshot.targets) > 1
    found = [(said.time, target, said) for target in snapshot.targets for said in target.events]
    found.sort(key=lambda item: item[0])
    lines = []
    for _, target, said in found:
        kind = "" if clean(said.text).startswith((said.kind, "out of memory")) else f"{clean(said.kind)}: "
        who = f"{target.pid if target.pid is not None else clean(target.name)} " if several else ""
        text = f"{clock(said.time)} {who}{kind}{clean(said.text)}"
        lines.append(Line((Span(cut(text, width), f"level:{said.level}" if said.level else f"event:{said.kind}"),)))
    return lines


def help_lines(width: int, ascii_only: bool = False) -> list[str]:
    """What the keys do, and what the characters mean."""
    signs = ASCII if ascii_only else BLOCKS
    said = "Sizes are GiB. t and c ask first; the process does it at its next memguard.checkpoint(), on its own thread."
    return [
        "q quit   ? this help   p pause   arrows select, and scroll",
        "t trim what is selected   c change the cap of the framework",
        "",
        f"{signs.used} live arrays   {signs.cached} cached   {signs.unknown} perhaps held   {signs.free} room   "
        f"{signs.cap} the cap",
        "",
        *wrapped(said, width, 4),
    ]
