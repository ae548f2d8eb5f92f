"""entries: the contenders of a case, made and filled, then checked; who fails or is wrong stays as a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvgen.bench import ours
from kvgen.bench.cases import RIVALS, Case
from kvgen.bench.contender import Contender, Scene, Shape
from kvgen.bench.expect import Expected, Verdict
from kvgen.bench.peak import kind_of
from kvgen.bench.peers.registry import Peer
from kvgen.bench.report import FAILED, OK, WRONG
from kvgen.bench.turns import SLOW_S, Calls, Clock, Lane
from kvgen.errors import UnsupportedError
from kvgen.library import Library

Say = Callable[[str, int, int, str], None]
"""say(stage, done, total, note): progress."""

THIRD_PARTY = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OSError,
    ImportError,
    MemoryError,
)
"""What another library may raise; its row says it. kvgen's own errors end the run instead."""


@dataclass
class Entry:
    """A contender on its way to a row."""

    name: str
    case: Case
    scene: Scene = field(repr=False)
    format: str = ""
    spec: str | None = None
    """Name of kvgen's spec; None for a peer."""
    contender: Contender | None = None
    status: str = OK
    message: str = ""
    error: float | None = None
    tolerance: float | None = None
    oracle_error: float | None = None
    lane: Lane | None = None
    calls: int = 0
    """Calls in one sample."""
    call_s: float = 0.0
    """Seconds of the last call that was checked."""

    @property
    def arithmetic(self) -> str | None:
        """What its queries are multiplied in at best: ``bf16`` or ``f32``; None where there is no figure."""
        library = getattr(self.contender, "library", None)
        dtype = self.format if library is None else library.spec.attention.q_dtype
        return kind_of("bf16" if dtype in ("bf16", "fp8") else "f32")

    def fail(self, error: Exception) -> None:
        """Note why a peer could not run; an error of kvgen's own is raised."""
        if self.spec is not None:
            raise error
        lines = str(error).strip().splitlines() or [""]
        self.status, self.message = FAILED, f"{type(error).__name__}: {lines[0][:200]}"

    def warm_up(self, clock: Clock, threads: int) -> None:
        """Find how many calls make a sample, and what it costs."""
        assert self.contender is not None
        calls = Calls(self.contender.call, clock, wake=threads > 1)
        seconds = self.call_s if self.call_s > SLOW_S else calls.warm_up()
        self.calls = calls.reps
        self.lane = Lane(self.name, calls, cost_s=seconds * calls.reps)


def gather(
    case: Case,
    libraries: Mapping[str, Library],
    peers: Sequence[Peer],
    scene_of: Callable[[Case, Shape], Scene],
    say: Say,
) -> tuple[list[Entry], dict[str, str]]:
    """All contenders of a case and of the even one beside it, filled; and who cannot take part, and why."""
    entries: list[Entry] = []
    left_out: dict[str, str] = {}
    for each in (case, *([RIVALS[case.even]] if case.even else [])):
        shapes = [Shape.of(library.spec) for library in libraries.values()]
        # Variants of a spec have masks of their own, and so other right outputs, of the same values.
        scenes = {shape: scene_of(each, shape) for shape in dict.fromkeys(shapes)}
        scene = scenes[shapes[0]]
        tail = "" if each is case else " (even)"
        for (name, library), shape in zip(libraries.items(), shapes, strict=True):
            say(f"{case.name}: filling caches", 0, 1, f"kvgen {name}")
            made = ours.make(scenes[shape], library, f"kvgen {name}{tail}")
            entries.append(Entry(made.name, each, scenes[shape], made.format, name, made))
        for peer, form in _forms(case, libraries, peers):
            entry = Entry(f"{peer.name} {form}{tail}", each, scene, form)
            say(f"{case.name}: filling caches", 0, 1, entry.name)
            try:
                entry.contender = peer.make(scene, form)
            except UnsupportedError as error:
                left_out[entry.name] = str(error)
                continue
            except THIRD_PARTY as error:
                entry.fail(error)
            entries.append(entry)
    return entries, left_out


def _forms(case: Case, libraries: Mapping[str, Library], peers: Sequence[Peer]) -> list[tuple[Peer, str]]:
    """Each peer that does the op, with each of its formats that stands against one of the specs."""
    specs = [library.spec for library in libraries.values()]
    pairs = [(peer, peer.format_of(spec)) for peer in peers if case.op in peer.ops for spec in specs]
    return list(dict.fromkeys((peer, form) for peer, form in pairs if form is not None))


def check(entries: Sequence[Entry], case: Case, say: Say) -> None:
    """Compare what the first and the last set of every contender give; who is wrong is not timed."""
    expected: dict[int, Expected] = {}
    for at, entry in enumerate(entries):
        say(f"{case.name}: checking outputs", at, len(entries), entry.name)
        if entry.contender is None:
            continue
        right = expected.setdefault(id(entry.scene), Expected(entry.scene))
        try:
            verdicts = _judged(entry, entry.contender, right)
        except THIRD_PARTY as error:
            entry.fail(error)
            continue
        worst = max(verdicts, key=lambda verdict: verdict.share)
        exact = [verdict for verdict in verdicts if not verdict.oracle] or verdicts  # masks have none
        told = max(exact, key=lambda verdict: verdict.share)
        entry.error, entry.tolerance = told.error, told.tolerance
        entry.oracle_error = max((found.error for found in verdicts if found.oracle), default=None)
        if not worst.right:
            entry.status = WRONG
            entry.message = f"{worst.what}: off by {worst.error:.3g} where {worst.tolerance:.3g} is allowed"


def _judged(entry: Entry, contender: Contender, right: Expected) -> list[Verdict]:
    """The verdicts on the first and the last set; a slow contender is called once."""
    verdicts: list[Verdict] = []
    for turn in _turns(contender, entry.case):
        start = time.perf_counter()
        contender.call(turn)
        entry.call_s = time.perf_counter() - start
        verdicts += right.judge(contender, turn)
        if entry.call_s > SLOW_S:
            break
    return verdicts


def _turns(contender: Contender, case: Case) -> list[int]:
    """The calls to check. An append can be read back only while its pages are new."""
    last = contender.sets - 1
    return sorted({0, min(1, last) if case.op == "append" else last})
