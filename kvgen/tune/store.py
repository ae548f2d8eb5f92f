"""store: tuned winners as small JSON files, looked up by what they depend on and trusted in nothing.

``<folder>/<target>/<op>__<spec8>.json``, where spec8 is the hash of *what the op reads* of the spec (a merge
does not care for page sizes). Every field stands in the file in clear and is checked when it is read: a
truncated or foreign file is set aside with one warning, a schedule outside the space or across its
constraints likewise. A file whose kernel or schedule space has changed since is stale: its schedules are
starting points, no more (where templates have changed, the kernel is rendered again and compared). So are
those of a CPU with other optional instructions (``elsewhere``), except where nothing else is known. What was
measured goes before what was predicted, wherever it lies.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import kvgen
from kvgen import bounded, paths, trust
from kvgen.errors import UnsupportedError
from kvgen.ir import Schedule
from kvgen.ir.schedule import Knob
from kvgen.tune.bucket import Bucket, nearest
from kvgen.tune.key import Key
from kvgen.tune.space import Space

FORMAT = 2
"""Raised whenever a field of the file changes its meaning."""

MOST_BYTES = 1 << 20
"""Of a record. One has a few thousand."""

HOWS = ("measured", "predicted")

TEXTS = ("templates", "space", "how", "effort", "device", "date", "kvgen")
"""Fields that hold a text."""


@dataclass(frozen=True)
class Best:
    """The winner of one bucket."""

    schedule: Schedule
    seconds: float | None
    """Seconds a call (or the model's figure)."""
    default_seconds: float | None
    """The same of the default schedule; None where it failed."""


@dataclass(frozen=True)
class Winners:
    """What a file holds beside its key."""

    schedule: Schedule
    """The one for a library that does not know its workload."""
    buckets: Mapping[str, Best]
    how: str
    """``measured`` or ``predicted``."""
    effort: str
    device: str
    """Where it was measured; empty for a prediction."""
    date: str
    """Day, ISO 8601."""
    version: str = field(default_factory=lambda: kvgen.__version__)
    """Version of kvgen."""
    stale: bool = False
    """Whether the kernel or the space has changed since; never stored."""
    elsewhere: bool = False
    """Whether it is of a CPU with other optional instructions; never stored."""

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """How little it is worth: smaller is better."""
        return self.stale, self.elsewhere, self.how == "predicted"

    def at(self, bucket: Bucket | None) -> Schedule:
        """The schedule for a workload: its own bucket, else the nearest; without one, the general one."""
        name = nearest(bucket, self.buckets) if bucket else None
        return self.buckets[name].schedule if name else self.schedule


def folders(cache_dir: Path | None) -> Iterator[tuple[Path, bool]]:
    """Where winners are looked for, best first, and whether they were made on this machine."""
    if cache_dir is not None:
        yield cache_dir, True
    elif (own := paths.readable("tune")) is not None:
        yield own, True
    shipped = resources.files("kvgen.autotune_cache")
    if isinstance(shipped, Path):
        yield shipped, False


def find(
    key: Key, space: Space, facts: Mapping[str, Knob], *, cache_dir: Path | None = None, own: bool = False
) -> Winners | None:
    """The stored winners of a key that are worth most (see ``Winners.rank``), of equal ones the nearest.

    ``own``: look only where this machine's results go, not at what came with the package.
    """
    best: Winners | None = None
    for folder, local in folders(cache_dir):
        if own and not local:
            continue
        found = read(folder / key.file, key, space, facts, local=local)
        if found is not None and (best is None or found.rank < best.rank):
            best = found
    return best


def read(
    path: Path, key: Key, space: Space, facts: Mapping[str, Knob], *, local: bool = True
) -> Winners | None:
    """The winners in one file; None where there is none, or none that can be trusted.

    A damaged file of this machine is set aside, with a warning; one of the package is left alone.
    """
    refuse = paths.set_aside if local else warn
    try:
        if local and (reason := trust.fault(path)):
            raise _BadError(f"is not used, because {reason}")
        return _load(path, key, space, facts)
    except _BadError as error:
        refuse(path, str(error))
        return None


def fault(path: Path, key: Key, space: Space, facts: Mapping[str, Knob]) -> str:
    """What is wrong with a file, in the words of ``read``; empty where nothing is. Leaves it alone."""
    try:
        return "" if _load(path, key, space, facts) else "it is gone"
    except _BadError as error:
        return f"it {error}"


def _load(path: Path, key: Key, space: Space, facts: Mapping[str, Knob]) -> Winners | None:
    try:
        raw = bounded.read_json(path, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:  # no UTF-8, no JSON, an endless number, too large or too deep
        raise _BadError(f"is no tuning record ({error})") from None
    except OSError as error:
        raise _BadError(f"cannot be read ({error.strerror})") from None
    try:
        return _parse(raw, key, space, facts)
    except _BadError as error:
        raise _BadError(f"is not what its name says: {error}") from None


def write(winners: Winners, key: Key, *, cache_dir: Path | None = None) -> Path:
    """Store winners; a folder that cannot be written is replaced by a temporary one, with one warning."""
    folder = home(key, cache_dir)
    text = dump(winners, key)
    name = Path(key.file).name
    try:
        paths.write_atomic(folder / name, text)
    except OSError as error:  # it could be written a moment ago: a disk that fills, a mount that changes
        if error.errno not in paths.UNWRITABLE:
            raise
        folder = paths.fallback(str(folder), f"writing a record failed ({error.strerror})")
        paths.write_atomic(folder / name, text)
    return folder / name


def home(key: Key, cache_dir: Path | None) -> Path:
    """The folder of a key's files, made and writable; a temporary one where it cannot be (warned)."""
    base = paths.subfolder("tune") if cache_dir is None else paths.writable(cache_dir)
    return paths.writable(base / key.target)


def evict(key: Key, reason: str, *, cache_dir: Path | None = None) -> None:
    """Set aside this machine's record of a key, with a warning that gives the reason."""
    for folder, local in folders(cache_dir):
        if local and (folder / key.file).exists():
            paths.set_aside(folder / key.file, reason)


def dump(winners: Winners, key: Key) -> str:
    """The file's text: sorted keys, so that a change reads as one."""
    body = {
        "format": FORMAT,
        **key.identity(),
        "templates": key.templates,
        "source": key.source(winners.schedule) if key.source else "",
        "space": key.space,
        "schedule": winners.schedule.to_dict(),
        "buckets": {
            name: {
                "schedule": best.schedule.to_dict(),
                "seconds": _short(best.seconds),
                "default_seconds": _short(best.default_seconds),
            }
            for name, best in winners.buckets.items()
        },
        "how": winners.how,
        "effort": winners.effort,
        "device": winners.device,
        "date": winners.date,
        "kvgen": winners.version,
    }
    return json.dumps(body, indent=1, sort_keys=True) + "\n"


def _short(seconds: float | None) -> float | None:
    """Four digits: more than a measurement has, and a change of the file reads as one."""
    return None if seconds is None else float(f"{seconds:.4g}")


def warn(path: Path, reason: str) -> None:
    """Warn about a file that is left as it is."""
    warnings.warn(f"{path}: {reason}; ignored", paths.CacheWarning, stacklevel=3)


class _BadError(ValueError):
    """A field that cannot be right."""


def _parse(raw: Any, key: Key, space: Space, facts: Mapping[str, Knob]) -> Winners:
    if not isinstance(raw, dict):
        raise _BadError("not an object")
    want = {"format": FORMAT, **key.identity()}
    features = raw.get("features")
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise _BadError(f"features is {features!r}, no list of names")
    for name, value in want.items():
        if raw.get(name) != value and name != "features":
            raise _BadError(f"{name} is {raw.get(name)!r}, not {value!r}")
    texts = {name: raw.get(name) for name in TEXTS}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise _BadError(f"{name} is {value!r}, not a text")
    if raw["how"] not in HOWS:
        raise _BadError(f"how is {raw['how']!r}")
    stale = raw["space"] != key.space
    if not stale and raw["templates"] != key.templates:
        stale = not _same_kernel(raw, key, space, facts)
    elsewhere = features != want["features"]
    general = _schedule(raw.get("schedule"), key, space, facts, stale)
    rows = raw.get("buckets")
    if not isinstance(rows, dict):
        raise _BadError("buckets is no object")
    found: dict[str, Best] = {}
    for name, row in rows.items():
        try:
            Bucket.parse(key.op, name)
        except ValueError as error:
            raise _BadError(str(error)) from None
        if not isinstance(row, dict):
            raise _BadError(f"bucket {name} is no object")
        schedule = _schedule(row.get("schedule"), key, space, facts, stale)
        found[name] = Best(schedule, _seconds(row, "seconds"), _seconds(row, "default_seconds"))
    for knob in space.numerics:
        if len({best.schedule[knob] for best in found.values()} | {general[knob]}) > 1:
            raise _BadError(f"{knob} decides a result's bits and differs between buckets")
    given = (raw["how"], raw["effort"], raw["device"], raw["date"], raw["kvgen"])
    return Winners(general, found, *given, stale, elsewhere)


def _same_kernel(raw: Mapping[str, Any], key: Key, space: Space, facts: Mapping[str, Knob]) -> bool:
    """Whether the kernel of the stored schedule is rendered as it was when it won."""
    if key.source is None or not raw.get("source"):
        return False
    try:
        return bool(raw["source"] == key.source(_schedule(raw.get("schedule"), key, space, facts, False)))
    except (_BadError, UnsupportedError):
        return False


def _schedule(raw: Any, key: Key, space: Space, facts: Mapping[str, Knob], stale: bool) -> Schedule:
    """A stored schedule that the present space allows. A stale one keeps the knobs that still exist."""
    if not isinstance(raw, dict):
        raise _BadError(f"schedule is {raw!r}")
    seed = dict(space.seeds["any"])
    knobs: dict[str, Knob] = {}
    for name, values in space.knobs.items():
        value: Any = raw.get(name)
        pinned = name in key.pins and value == key.pins[name]
        if not pinned and not any(type(value) is type(v) and value == v for v in values):
            if not stale:
                raise _BadError(f"schedule has {name} = {value!r}, and the space {list(values)}")
            value = seed[name]
        knobs[name] = value
    if not stale and set(raw) != set(space.knobs):
        raise _BadError(f"schedule has knobs {sorted(raw)}, and the space {sorted(space.knobs)}")
    schedule = Schedule.of(knobs)
    if not space.allows(schedule, facts):
        raise _BadError(f"schedule {schedule} breaks a constraint")
    return schedule


def _seconds(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _BadError(f"{name} is {value!r}")
    return float(value)
