"""Buckets: the sizes of workload for which schedules are timed and stored. Light: a hit needs them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """One size of workload of one op."""

    op: str
    sizes: tuple[int, ...]
    """decode, gather: requests x keys. prefill: requests x queries x keys. append: tokens. copy: pages.
    merge: states x rows."""

    @property
    def name(self) -> str:
        """``8x4096``: the sizes, as stored."""
        return "x".join(map(str, self.sizes))

    @classmethod
    def parse(cls, op: str, name: str) -> Bucket:
        """The inverse of ``name``; ``ValueError`` for a text that is none."""
        sizes = tuple(int(part) for part in name.split("x"))
        if len(sizes) != len(BUCKETS["quick"][op][0]) or any(size < 1 for size in sizes):
            raise ValueError(f"{name!r} is no workload of {op}")
        return cls(op, sizes)


BUCKETS: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    "quick": {
        "append": ((256,),),
        "decode": ((1, 512), (8, 4096)),
        "prefill": ((1, 128, 1024),),
        "merge": ((4, 256),),
        "copy": ((64,),),
        "gather": ((4, 1024),),
    },
    "full": {
        "append": ((8,), (256,), (2048,)),
        "decode": ((1, 512), (1, 8192), (8, 1024), (8, 4096), (32, 2048)),
        "prefill": ((1, 128, 1024), (1, 512, 512), (4, 32, 2048)),
        "merge": ((2, 64), (4, 256)),
        "copy": ((4,), (64,)),
        "gather": ((1, 4096), (4, 1024)),
    },
}
"""Sizes by effort and op."""


def buckets(op: str, effort: str) -> tuple[Bucket, ...]:
    """The workloads of ``op`` for an effort."""
    return tuple(Bucket(op, sizes) for sizes in BUCKETS[effort][op])


def nearest(wanted: Bucket, names: Iterable[str]) -> str | None:
    """The stored bucket closest to ``wanted`` in log sizes; None where there is none."""
    found = [Bucket.parse(wanted.op, name) for name in names]
    distance = {
        b.name: sum(abs(math.log(x / y)) for x, y in zip(b.sizes, wanted.sizes, strict=True)) for b in found
    }
    return min(sorted(distance), key=distance.__getitem__, default=None)
