"""Reports of ``kvgen bench`` as a run leaves them, made without one."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvgen.bench.facts import Facts
from kvgen.bench.report import OK, CaseReport, Limit, Report, Row
from kvgen.bench.stats import Figure

LABELS = ("bf16", "f16", "int8", "int8-fast", "int4-fast", "e4m3-blocks-of-32", "nvfp4", "kivi-keep-4")

PEERS = ("sdpa-gqa", "flex-attention-compiled", "vllm-32")


def figure(value: float) -> Figure:
    return Figure(value, value * 0.99, value * 1.01, 30)


def recorded(specs: int, step: float = 9.0, peaks: bool = False) -> Report:
    """One case of some specs and three peers, each ``step`` times as slow as the one before."""
    names = [f"llama3-8b-{label}" for label in LABELS[:specs]]
    contenders = [(f"kvgen {name}", name) for name in names] + [(name, None) for name in PEERS]
    rows = [
        Row(
            contender, "decode-8x4096", "bf16", spec, OK, error=3.2e-3 / (at + 1), sets=2, calls=3,
            seconds=figure(1.2345e-4 * step**at), gb_per_s=17.7 / (at + 1), fraction=figure(0.93 / (at + 1)),
            gflop_per_s=812.0 if peaks else None, of_peak=figure(0.5) if peaks else None,
            ratios={name: figure(1.01 * (at + 1) ** 3) for name in names},
            samples=dict.fromkeys(range(30), 1.0), dropped=at,
        )
        for at, (contender, spec) in enumerate(contenders)
    ]  # fmt: skip
    limits = tuple(Limit(name, 2, 1 << 30, figure(1.9e10), 0) for name in names)
    shape, title = "32 query and 8 KV heads of 128", "Decode, 8 requests of 4,096 keys"
    case = CaseReport(
        "decode-8x4096", title, shape, 30, limits, {"bf16": figure(1.6e12)} if peaks else {}, None, None, 0,
        tuple(rows), {}, None,
    )  # fmt: skip
    values: dict[str, Any] = {field.name: "?" for field in dataclasses.fields(Facts)}
    values |= {"threads": 2, "l3_bytes": 1 << 25, "isa": "avx512", "cpu": "Some CPU"}
    return Report(Facts(**values), dict.fromkeys(names, "0" * 64), True, (case,))
