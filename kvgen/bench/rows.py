"""rows: samples of contenders as figures: medians, fractions of the read limit, ratios to kvgen's specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvgen.bench.entries import Entry
from kvgen.bench.limits import Limits, kept
from kvgen.bench.report import DISTURBED, OK, Row
from kvgen.bench.stats import figure, paired
from kvgen.bench.turns import LEAST

Samples = Mapping[int, float]


def rows_of(entries: Sequence[Entry], limits: Limits, others: frozenset[int]) -> tuple[Row, ...]:
    """A row for each entry; rounds in ``others`` do not count."""
    samples = {id(entry): kept(entry.lane, others) for entry in entries}
    found = []
    for entry in entries:
        own, same = samples[id(entry)], [other for other in entries if other.case is entry.case]
        rivals = {other.spec: samples[id(other)] for other in same if other.spec is not None}
        even = [
            samples[id(other)]
            for other in entries
            if other.case.name == entry.case.even and other.name == f"{entry.name} (even)"
        ]
        flop, limit = _flop(entry), kept(limits.lane_of(entry.spec), others)
        peak = kept(limits.peaks.get(entry.arithmetic or ""), others) if flop else {}
        row = _row(entry, own, rivals, limit)
        found.append(
            replace(
                row,
                gflop_per_s=flop / row.seconds.median / 1e9 if row.seconds and flop else None,
                of_peak=paired({turn: flop / value for turn, value in own.items()}, peak),
                over_even=paired(own, even[0]) if even else None,
            )
        )
    return tuple(found)


def _row(entry: Entry, samples: Samples, rivals: Mapping[str, Samples], limit: Samples) -> Row:
    seconds, contender = figure(samples.values()), entry.contender
    nbytes = contender.nbytes if contender else 0
    status, message, dropped = entry.status, entry.message, entry.lane.dropped if entry.lane else 0
    if status == OK and (len(samples) < LEAST or dropped > 2 * len(samples)):
        status = DISTURBED
        message = f"{dropped} of {dropped + len(samples)} samples dropped: threads waited for a core"
    if status == OK and contender and 2 * contender.sets * nbytes < entry.scene.cold_bytes:
        message = f"memory comes back after {contender.sets * nbytes >> 20} MB: a cache may still hold it"
    return Row(
        contender=entry.name,
        case=entry.case.name,
        format=entry.format,
        spec=entry.spec,
        status=status,
        message=message,
        error=entry.error,
        tolerance=entry.tolerance,
        oracle_error=entry.oracle_error,
        nbytes=nbytes,
        sets=contender.sets if contender else 0,
        calls=entry.calls,
        seconds=seconds,
        gb_per_s=nbytes / seconds.median / 1e9 if seconds else None,
        fraction=paired({turn: nbytes / value for turn, value in samples.items()}, limit),
        ratios={name: ratio for name, rival in rivals.items() if (ratio := paired(samples, rival))},
        dropped=dropped,
        samples=dict(samples),
    )


def _flop(entry: Entry) -> int:
    """Multiplications and additions of a prefill; 0 of other ops, which memory bounds."""
    shape = entry.scene.shape
    pairs = entry.case.pairs if entry.case.op == "prefill" else 0
    return 2 * pairs * shape.q_heads * (shape.head_dim + shape.v_head_dim)
