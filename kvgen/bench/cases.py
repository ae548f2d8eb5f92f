"""Cases: which op on which lengths. The default set, and any other shape in free form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.errors import ArgumentError
from kvgen.names import told

ATTENTION = ("decode", "prefill")


@dataclass(frozen=True)
class Case:
    """One call of one op."""

    name: str
    op: str
    """decode, prefill, append, copy or gather."""
    kv_lens: tuple[int, ...] = ()
    """Keys of each request, after the append of this step; empty for append and copy."""
    q_lens: tuple[int, ...] = ()
    """Queries of each request, its last positions; empty unless the op attends."""
    count: int = 0
    """Tokens of an append, one for each of so many requests; tokens of the pages that a copy moves."""
    even: str = ""
    """Name of the case with as many keys in equal requests, timed in the same rounds; "" for none."""

    @property
    def keys(self) -> int:
        """Keys of all requests."""
        return sum(self.kv_lens)

    @property
    def queries(self) -> int:
        """Queries of all requests."""
        return sum(self.q_lens)

    def keys_within(self, window: int | None) -> int:
        """Keys that any query sees, of all requests."""
        if window is None or not self.q_lens:
            return self.keys
        return sum(min(n, window + q) for q, n in zip(self.q_lens, self.kv_lens, strict=True))

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that a causal mask lets through."""
        return sum(q * n - q * (q - 1) // 2 for q, n in zip(self.q_lens, self.kv_lens, strict=True))

    @property
    def groups(self) -> tuple[tuple[int, int, int], ...]:
        """Neighbouring requests of equal lengths, as (requests, queries each, keys each)."""
        found: list[tuple[int, int, int]] = []
        for shape in zip(self.q_lens, self.kv_lens, strict=True):
            if found and found[-1][1:] == shape:
                found[-1] = (found[-1][0] + 1, *shape)
            else:
                found.append((1, *shape))
        return tuple(found)

    def __str__(self) -> str:
        if self.op in ("append", "copy"):
            return f"{self.op} of {self.count} tokens{' in whole pages' if self.op == 'copy' else ''}"
        groups = self.groups if self.q_lens else ((len(self.kv_lens), 1, self.kv_lens[0]),)
        return f"{self.op} {' and '.join(_shape(self.op, *group) for group in groups)}"


def _shape(op: str, batch: int, queries: int, keys: int) -> str:
    """``8 x 4096 with 4 queries each``, ``1 x 512 on 8192`` (a chunk), ``4 x 512``."""
    if op == "prefill":
        return f"{batch} x {queries}" + (f" on {keys - queries}" if keys > queries else "")
    return f"{batch} x {keys}" + (f" with {queries} queries each" if queries > 1 else "")


def decode(batch: int, context: int, queries: int = 1) -> Case:
    """Decode of equal requests with one query each, or a few."""
    tail = f"-q{queries}" if queries > 1 else ""
    return Case(f"decode-{batch}x{context}{tail}", "decode", (context,) * batch, (queries,) * batch)


def prefill(batch: int, queries: int, context: int | None = None) -> Case:
    """Prefill of whole prompts, or of a chunk of ``queries`` that ends a context."""
    keys = queries if context is None else context
    tail = "" if keys == queries else f"-on-{keys - queries}"
    return Case(f"prefill-{batch}x{queries}{tail}", "prefill", (keys,) * batch, (queries,) * batch)


_MIXED = Case("decode-mixed", "decode", (8192, *(128,) * 31), (1,) * 32, even="decode-even")
_EVEN = Case("decode-even", "decode", (_MIXED.keys // 32,) * 32, (1,) * 32)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        decode(1, 512),
        decode(1, 8192),
        decode(8, 4096),
        decode(32, 512),
        decode(32, 2048),
        decode(8, 4096, 4),
        _MIXED,
        prefill(1, 2048),
        prefill(4, 512),
        prefill(1, 512, 8192 + 512),
        Case("append-8", "append", count=8),
        Case("append-32", "append", count=32),
        Case("copy-1024", "copy", count=1024),
        Case("gather-8x1024", "gather", (1024,) * 8),
    )
}
"""The default set, by name."""

VARIANT_CASES = ("decode-1x8192", "prefill-1x512-on-8192")
"""Where masks and scores are timed, unless the caller chooses."""

RIVALS = {_EVEN.name: _EVEN}
"""Cases that run beside another one only."""


def choose(names: Sequence[str]) -> list[Case]:
    """The cases named, an op standing for all of its; the default set where none is.

    Raises ``ArgumentError`` for a name that is none, with the nearest one.
    """
    chosen: dict[str, Case] = {}
    for name in names:
        found = [case for case in CASES.values() if name in (case.name, case.op)]
        if not found:
            hint = told(name, CASES)
            raise ArgumentError(f"--case {name}: no such case; {hint}--list-cases shows all")
        chosen |= {case.name: case for case in found}
    return list(chosen.values()) if names else list(CASES.values())


def free(batches: Sequence[int], context: int | None, queries: int | None) -> list[Case]:
    """Cases in free form: as many queries as keys are a prefill, up to 16 a decode, others a chunk.

    Raises ``ArgumentError`` for more queries than keys.
    """
    keys, count = context or 4096, queries or 1
    if count > keys:
        raise ArgumentError(
            f"--queries {count}: each request has --context {keys} keys, its queries included"
        )
    few = count <= 16 and count < keys
    return [
        decode(batch, keys, count) if few or count == 1 else prefill(batch, count, keys)
        for batch in batches or [8]
    ]
