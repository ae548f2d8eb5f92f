"""report: what a run found, as data: rows of contenders, the read limits beside them, who was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvgen.bench.facts import Facts
from kvgen.bench.stats import Figure
from kvgen.errors import ArgumentError, brief

OK, WRONG, FAILED, DISTURBED = "ok", "wrong", "failed", "disturbed"
"""How a contender ended: timed; outputs wrong, so not timed; could not run; few undisturbed samples, or
more than two dropped for each."""


@dataclass(frozen=True)
class Row:
    """One contender of one case."""

    contender: str
    case: str
    """The case, or the even one beside it."""
    format: str
    spec: str | None
    """Name of kvgen's spec; None for a peer."""
    status: str
    message: str = ""
    """Why it was not timed, or what is wrong with its samples."""
    error: float | None = None
    """Largest error of its outputs over the largest output, from exact values: its format's share as well."""
    tolerance: float | None = None
    oracle_error: float | None = None
    """The same of kvgen's, from what the oracle makes of the stored values: the kernel's share."""
    nbytes: int = 0
    """Bytes of cache that a call reads and writes."""
    sets: int = 0
    """Sets of memory that calls took in turn."""
    calls: int = 0
    """Calls in one sample."""
    seconds: Figure | None = None
    """Seconds a call."""
    gb_per_s: float | None = None
    gflop_per_s: float | None = None
    """Arithmetic of prefill, masked pairs not counted."""
    fraction: Figure | None = None
    """Its bytes per second over the read limit of the same round."""
    ratios: dict[str, Figure] = field(default_factory=dict)
    """Its time over that of each of kvgen's specs, in the same rounds: above 1, kvgen is faster."""
    of_peak: Figure | None = None
    """Arithmetic of prefill over the limit of the same round."""
    over_even: Figure | None = None
    """Its time over its own in the even case; None where the case has none."""
    dropped: int = 0
    """Samples that threads had waited in."""
    samples: dict[int, float] = field(default_factory=dict)
    """Seconds a call of each round."""


@dataclass(frozen=True)
class Limit:
    """The read limit of one pool."""

    of: str
    """Whose pool: a spec's name."""
    threads: int
    nbytes: int
    bytes_per_s: Figure | None
    dropped: int


@dataclass(frozen=True)
class CaseReport:
    """One case of specs that share an attention."""

    case: str
    title: str
    shape: str
    """The attention that its specs share."""
    rounds: int
    limits: tuple[Limit, ...]
    peaks: dict[str, Figure]
    """Of a prefill: multiplications and additions a second, from registers, by arithmetic (bf16, f32)."""
    mode: str | None
    """``slow`` or ``fast``: how the memory serves two threads; None for one."""
    scaling: float | None
    """Read limit of all threads over that of one; None for one."""
    other_mode_rounds: int
    """Rounds in the other mode, which do not count."""
    rows: tuple[Row, ...]
    left_out: dict[str, str]
    """Peers that could not take part, and why."""
    stolen: float | None
    """Share of the machine's time that its hypervisor took meanwhile; None where it does not say."""


@dataclass(frozen=True)
class Report:
    """A whole run."""

    facts: Facts
    specs: dict[str, str]
    """Name of each spec and its hash."""
    waits_counted: bool
    """Whether this kernel counts the time that threads wait for a core; if not, no sample was dropped."""
    cases: tuple[CaseReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """The inverse of ``to_json``. Raises ``ArgumentError`` for data that is no report."""
        try:
            facts = Facts(**data["facts"])
            cases = tuple(_case(case) for case in data["cases"])
            return cls(facts, dict(data["specs"]), bool(data["waits_counted"]), cases)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{type(error).__name__}: {brief(str(error))}"
            raise ArgumentError(f"not a report of this version of kvgen bench ({reason})") from None


def _figure(data: Mapping[str, Any] | None) -> Figure | None:
    return None if data is None else Figure(**data)


def _case(data: Mapping[str, Any]) -> CaseReport:
    limits = tuple(
        Limit(**{**limit, "bytes_per_s": _figure(limit["bytes_per_s"])}) for limit in data["limits"]
    )
    peaks = {kind: Figure(**value) for kind, value in data["peaks"].items()}
    rows = tuple(_row(row) for row in data["rows"])
    return CaseReport(**{**data, "limits": limits, "peaks": peaks, "rows": rows})


def _row(data: Mapping[str, Any]) -> Row:
    return Row(
        **{
            **data,
            "seconds": _figure(data["seconds"]),
            "fraction": _figure(data["fraction"]),
            "of_peak": _figure(data["of_peak"]),
            "over_even": _figure(data["over_even"]),
            "ratios": {name: Figure(**value) for name, value in data["ratios"].items()},
            "samples": {int(turn): value for turn, value in data["samples"].items()},
        }
    )
