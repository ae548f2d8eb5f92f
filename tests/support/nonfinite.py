"""The tables of docs/numerics.md, and a request for each case of what attention returns.

Every case is a request of its own in one batch: 200 keys (but for those without any), three queries, and one
odd thing that KV head 0 sees. KV head 1 holds ordinary numbers throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "numerics.md"
KV_HEADS, GROUP, WIDTH, KEYS, QUERIES = 2, 2, 64, 200, 3
ODD = 40
"""The element of V that is spoiled."""
EARLY, LATE = 3, KEYS - QUERIES
"""A key in the first tile; the last one that all three queries see, in a tile that causal rows mask."""
INF, NAN = math.inf, math.nan


def table(section: str) -> dict[str, list[str]]:
    """The rows of the table under a heading: the first column's text (without backquotes) -> the others."""
    text = DOCUMENT.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].replace("`", ""): row[1:] for row in rows}


@dataclass
class Request:
    """Rows to append and to ask with: k and v [keys, KV_HEADS, WIDTH], q [QUERIES, q_heads, WIDTH]."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor


def _value(value: float, at: int = EARLY) -> Callable[[Request], None]:
    def edit(r: Request) -> None:
        r.v[at, 0, ODD] = value

    return edit


def _vanished(wild: int, hot: int) -> Callable[[Request], None]:
    """Key ``hot`` takes all weight of all rows: its score is some hundreds above the others."""

    def edit(r: Request) -> None:
        r.q[:] = r.q[0, 0]
        r.k[hot, 0] = r.q[0, 0] * 40
        r.v[wild, 0, ODD] = INF

    return edit


def _key(value: float, score: float = 0.0, v: float = 0.0, at: int = LATE) -> Callable[[Request], None]:
    """NaN in K, or an infinity that makes the score ``score`` of every query."""

    def edit(r: Request) -> None:
        r.k[at, 0, ODD] = value
        if score:
            r.q[:, :, ODD] = r.q[:, :, ODD].abs() + 0.1
        if v:
            r.v[at, 0, ODD] = v

    return edit


def _query(value: float) -> Callable[[Request], None]:
    def edit(r: Request) -> None:
        r.q[:, :GROUP, ODD] = value

    return edit


def _scores(early: float, others: float) -> Callable[[Request], None]:
    """``q.k / WIDTH``: of key ``EARLY``, and of all others (0: small ones)."""

    def edit(r: Request) -> None:
        r.q[:] = 1e19
        r.k *= 1e-20
        if others:
            r.k[:, 0] = others / 1e19
        r.k[EARLY, 0] = early / 1e19

    return edit


CASES: dict[str, Callable[[Request], None]] = {
    "v-nan": _value(NAN),
    "v-plus": _value(INF),
    "v-minus": _value(-INF, LATE),
    "v-vanished-early": _vanished(EARLY, 150),
    "v-vanished-late": _vanished(LATE, EARLY),
    "k-nan": _key(NAN),
    "k-plus": _key(INF, INF),
    "k-minus": _key(-INF, -INF),
    "k-minus-v-inf": _key(-INF, -INF, INF),
    "q-nan": _query(NAN),
    "q-inf": _query(INF),
    "over-plus": _scores(1e38, 0.0),
    "over-minus": _scores(-1e38, 0.0),
    "all-minus": _scores(-1e38, -1e38),
    "apart": _scores(1.5e28, -1.5e28),
    "masked": lambda r: None,
    "empty": lambda r: None,
}
"""Case -> what is done to an ordinary request."""
LENGTHS = {"masked": 1, "empty": 0}
"""Keys of the requests that have fewer; of three queries and one key, two see none."""
CAPPED = {
    "q-inf": "finite",
    "k-plus": "finite",
    "k-minus": "finite",
    "all-minus": "finite",
    "over-plus": "finite",
}
"""Under a soft cap, both of out and of lse: it makes numbers of infinite scores."""


def requests() -> dict[str, Request]:
    """A request for each case."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, edit in CASES.items():
        keys = (KEYS, KV_HEADS, WIDTH)
        k, v, q = (
            torch.randn(*s, generator=generator) for s in (keys, keys, (QUERIES, KV_HEADS * GROUP, WIDTH))
        )
        found[name] = Request(k, v, q)
        edit(found[name])
        length = LENGTHS.get(name, KEYS)
        found[name].k, found[name].v = k[:length], v[:length]
    return found


def holds(word: str, x: torch.Tensor, odd: list[int]) -> bool:
    """Whether a row (or its lse, of no width) is what the document says. ``odd``: elements of one block."""
    if word in ("NaN element", "NaN block"):
        rest = [d for d in range(x.shape[-1]) if d not in odd]
        return bool(x[..., odd].isnan().all() and x[..., rest].isfinite().all())
    if word == "finite":
        return bool(x.isfinite().all() and (x != 0).any())
    return bool(x.isnan().all() if word == "NaN" else (x == float(word)).all())
