"""support: which feature works on which target, found out by planning and rendering its kernels.

``python -m kvgen.support`` prints the page ``docs/support.md``; a test compares the two, and runs samples of
what the page says. Rows come from the registries: of variants, of formats, of targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgen import support_specs
from kvgen.builder import assemble
from kvgen.errors import SpecError, UnsupportedError
from kvgen.ir import Spec
from kvgen.ir.plan import OPS
from kvgen.ir.quant import FORMATS, GROUPS, SCALE_DTYPES, Format
from kvgen.passes.validate import load_spec
from kvgen.targets import TARGETS
from kvgen.variants import definitions, positions

ATTEND = ("decode", "prefill")
BASE: Mapping[str, Any] = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
"""[attention] of every row that is not about heads."""
BF16: Mapping[str, Any] = {"format": "bf16"}
MOVES = ("append", *ATTEND, "gather")
"""Ops that know how rows are stored."""
GROUPS_OF_HEADS = (1, 5, 7, 16, 32, 71, 128)
"""Query heads for each KV head."""
HEAD_DIMS = (16, 24, 64, 72, 80, 128, 192, 256, 512, 576)
BLOCK = 32
"""Elements of d, or tokens, that share a scale, in rows about such blocks."""
ROW: Mapping[str, int] = {"head": 1, "tok": 1}
CHANNEL: Mapping[str, int] = {"head": 1, "tok": BLOCK, "d": 1}
RENDERED = ("cpu-portable", "sm_90")
"""Targets for which kernels are rendered too; the same templates make those of the others."""


@dataclass(frozen=True, eq=False)
class Feature:
    """One row: a spec that has the feature, and the ops that it bears on."""

    group: str
    name: str
    raw: Mapping[str, Any] = field(repr=False)
    """The spec, as a file would hold it."""
    ops: tuple[str, ...]

    @property
    def spec(self) -> Spec:
        """The spec; ``SpecError`` where it is none."""
        return load_spec({"name": "support", **self.raw})


@dataclass(frozen=True)
class Answer:
    """One cell: why each op that does not work does not; empty where all work."""

    refused: Mapping[str, str]

    @property
    def works(self) -> bool:
        """Whether every op works."""
        return not self.refused


def features() -> Iterator[Feature]:
    """All rows, group by group."""
    for kind, title in (("mask", "Masks"), ("score", "Score terms"), ("sink", "Sinks")):
        for found in definitions(kind):
            also = ("merge",) if kind == "sink" else ()
            yield _feature(title, found.name, found.example, (*ATTEND, *also))
    for number, (name, scheme) in enumerate(positions().items()):
        # Kernels differ by the pairing and by where K is rotated; a scheme makes another table.
        for pairing in ("half", "interleaved") if number == 0 else ("half",):
            for stored, ops in (("post", ("append",)), ("pre", ATTEND)):
                rope = {"kind": name, "pairing": pairing, "stored": stored, **scheme.example}
                yield _feature("Positions", f"{name}, {pairing}, {stored}", {"rope": rope}, ops)
    both = {"head_dim": 192, "v_head_dim": 128, "rope": {"stored": "pre", "dim": 64}}
    yield _feature("Positions", "rotated when read, V inside K", both, ATTEND, BF16, {"alias": "k"})
    yield from _heads()
    yield from _wide()
    yield from _formats()


def _feature(
    group: str,
    name: str,
    attention: Mapping[str, Any],
    ops: tuple[str, ...],
    k: Mapping[str, Any] = BF16,
    v: Mapping[str, Any] | None = None,
) -> Feature:
    return _stored(group, name, attention, ops, {"page_size": 16, "k": k, "v": k if v is None else v})


def _stored(
    group: str, name: str, attention: Mapping[str, Any], ops: tuple[str, ...], cache: Mapping[str, Any]
) -> Feature:
    return Feature(group, name, {"attention": {**BASE, **attention}, "cache": cache}, ops)


def _heads() -> Iterator[Feature]:
    title = "Heads"
    for group in GROUPS_OF_HEADS:
        heads = {"q_heads": 2 * group, "kv_heads": 2}
        yield _feature(title, f"group of {group}", heads, (*ATTEND, "merge"))
    yield _feature(title, "one KV head", {"q_heads": 8, "kv_heads": 1}, OPS)
    for dim in HEAD_DIMS:
        yield _feature(title, f"head_dim {dim}", {"head_dim": dim}, MOVES)
    yield _feature(title, "head_dim 192, v_head_dim 128", {"head_dim": 192, "v_head_dim": 128}, MOVES)
    latent = {"q_heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
    for k in (BF16, {"format": "int8"}, {"format": "e4m3"}):
        name = f"MLA: V the first 512 of K's 576, {k['format']}"
        yield _feature(title, name, latent, OPS, k, {"alias": "k"})
    cross = {"causal": False}
    yield _feature(title, "cross attention: not causal", cross, ATTEND)
    for dtype in ("bf16", "f16", "f32"):
        yield _feature(title, f"queries in {dtype}", {"q_dtype": dtype}, ATTEND)


def _wide() -> Iterator[Feature]:
    """Rows that fill a GPU's registers and shared memory, or do not fit."""
    blocks = {**ROW, "d": BLOCK}
    for dim, dtype, stored in (
        (256, "f32", {"format": "f32"}),
        (320, "f32", {"format": "f32"}),
        (576, "f32", {"format": "f32"}),
        (576, "f32", {"format": "bf16"}),
        (576, "bf16", {"format": "f32"}),
        (128, "bf16", {"format": "int8", "group": blocks}),
        (256, "bf16", {"format": "int8", "group": blocks}),
        (576, "bf16", {"format": "int4", "group": blocks}),
        (256, "bf16", {"format": "nvfp4"}),
    ):
        name = (
            f"{stored['format']}{f' in blocks of {BLOCK}' * ('group' in stored)}, head_dim {dim}, q {dtype}"
        )
        yield _feature("Wide rows", name, {"head_dim": dim, "q_dtype": dtype}, MOVES, stored)


def _formats() -> Iterator[Feature]:
    for fmt in (fmt for fmt in FORMATS.values() if fmt.fast):
        for words, table in _tables(fmt):
            yield _feature("Formats of K and V", f"{fmt.name}{words}", {}, MOVES, table)
            if fmt.integer and "d" not in table["group"]:
                rough = {"qk": "int8", "pv": "int8"}
                name = f"{fmt.name}{words}; qk, pv = int8"
                yield _feature("Formats of K and V", name, rough, ATTEND, table)
    for fmt in FORMATS.values():
        for words, table in _examples(fmt):
            cache = {"page_size": BLOCK, "k": table, "v": table}
            yield _stored("More formats of K and V", f"{fmt.name}{words}", {}, MOVES, cache)
    yield from _places()


def _places() -> Iterator[Feature]:
    """Where scales lie and of what type they are, what rows go through first, and which stay unquantised."""
    int8: Mapping[str, Any] = {"format": "int8", "group": ROW}
    rotated = {**int8, "transform": "hadamard"}
    cut = {"size": 128 - BLOCK, **int8}, {"size": BLOCK, "format": "bf16"}
    latent = {"size": 512, "format": "e4m3", "group": {**ROW, "d": 128}}, {"size": 64, "format": "bf16"}
    rows: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
        **{f"scales in {dtype}": ({**int8, "scale_dtype": dtype},) * 2 + ({},) for dtype in SCALE_DTYPES[1:]},
        "scales in a pool of their own": ({**int8, "scales": "pool"},) * 2 + ({},),
        "scales behind the codes of their row": ({**int8, "scales": "inline"},) * 2 + ({},),
        "rotated by Hadamard": (rotated, rotated, {}),
        "K without its mean": ({**int8, "mean": True}, int8, {}),
        "rows in two segments": ({"segments": list(cut)}, int8, {}),
        "the first 4 tokens unquantised": (int8, int8, {"keep_first": 4}),
        "the last 32 tokens unquantised": (int8, int8, {"keep_last": 32}),
    }
    title = "Scales, transforms and raw tokens (int8, a scale per head and token)"
    for name, (k, v, more) in rows.items():
        yield _stored(title, name, {}, MOVES, {"page_size": BLOCK, "k": k, "v": v, **more})
    mla = {"q_heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
    k = {"segments": list(latent), "scales": "inline"}
    name = "MLA: 512 in e4m3 with a scale per 128, 64 in bf16, inline"
    yield _stored(title, name, mla, MOVES, {"page_size": 64, "k": k, "v": {"alias": "k"}})


def _examples(fmt: Format) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tables of a format that ``_tables`` does not have: its example, its affine codes, channels over
    tokens."""
    if fmt.keys:
        yield "", {"format": fmt.name}
        return
    if not fmt.scaled:
        return
    own = {"format": fmt.name, "group": ROW, **fmt.example}
    if not fmt.fast:
        yield (", affine" if own.get("affine") else ""), own
        if fmt.integer:
            yield ", symmetric", {**own, "affine": False}
    elif fmt.integer:
        yield ", affine", {**own, "affine": True}
    plain = {key: value for key, value in own.items() if key != "transform"}
    yield f", channels over {BLOCK} tokens", {**plain, "group": CHANNEL}


def _tables(fmt: Format) -> Iterator[tuple[str, dict[str, Any]]]:
    """The storage tables of a format, each with what it shares scales over."""
    if not fmt.scaled:
        yield "", {"format": fmt.name}
        return
    words = {"d": f"{BLOCK} elements of d", "head": "head", "tok": "token"}
    for dims in GROUPS:
        group = {dim: BLOCK if dim == "d" else 1 for dim in dims}
        shared = " and ".join(words[dim] for dim in dims) or "tensor"
        yield f", a scale per {shared}", {"format": fmt.name, "group": group}


def answer(feature: Feature, target: str) -> Answer:
    """What becomes of a feature's kernels on a target: each op planned and rendered in its variants."""
    try:
        library = assemble(feature.spec, target, tune="off")
    except (SpecError, UnsupportedError) as error:
        return Answer(dict.fromkeys(feature.ops, _words(error)))
    refused = {}
    for op in feature.ops:
        try:
            for variant in ("single", "multi") if op == "decode" else ("",):
                if target in RENDERED:
                    library.source(op, variant)
                else:
                    library.backend.plan(
                        op, library.spec, library.record, library.schedules[op], library.target, variant
                    )
        except UnsupportedError as error:
            refused[op] = _words(error)
    return Answer(refused)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())


def answers(
    rows: Iterable[Feature], targets: Sequence[str] = tuple(TARGETS)
) -> dict[Feature, dict[str, Answer]]:
    """Every cell of these rows."""
    return {row: {target: answer(row, target) for target in targets} for row in rows}


def page(cells: Mapping[Feature, Mapping[str, Answer]]) -> str:
    """The whole page, as markdown."""
    notes: dict[str, int] = {}
    groups: dict[str, dict[Feature, Mapping[str, Answer]]] = {}
    for row, found in cells.items():
        groups.setdefault(row.group, {})[row] = found
    blocks = [HEAD, *(section(rows, notes) for rows in groups.values()), support_specs.section()]
    if notes:
        listed = [f"{number}. {_escaped(text)}" for text, number in notes.items()]
        blocks.append("\n".join(["## Why not", "", *listed]))
    return "\n\n".join(blocks) + "\n"


def section(cells: Mapping[Feature, Mapping[str, Answer]], notes: dict[str, int]) -> str:
    """The table of one group. ``notes``: the number of each reason; new ones are added."""
    group, targets = next((row.group, list(found)) for row, found in cells.items())
    lines = [f"## {group}", "", f"| | ops | {' | '.join(targets)} |", f"|{'---|' * (len(targets) + 2)}"]
    for row, found in cells.items():
        ops = "all" if row.ops == OPS else ", ".join(row.ops)
        shown = [_cell(row, found[target], target, notes) for target in targets]
        lines.append(f"| {row.name} | {ops} | {' | '.join(shown)} |")
    return "\n".join(lines)


HEAD = """# What works where

Generated by `python -m kvgen.support > docs/support.md`: each row is one spec, whose kernels were planned
for each target. Masks, score terms, sinks and position schemes stand as in the examples of
`kvgen list`. A number refers to the message that kvgen gives before anything is compiled; where only some
ops are refused, they are named."""


def _cell(row: Feature, found: Answer, target: str, notes: dict[str, int]) -> str:
    if found.works:
        return "yes"
    by_note: dict[int, list[str]] = {}
    for op, said in found.refused.items():
        text = said.replace(f" on {target}: ", ": ")  # one note for all targets that say the same
        by_note.setdefault(notes.setdefault(text, len(notes) + 1), []).append(op)
    if len(found.refused) == len(row.ops):
        return f"no: {', '.join(map(str, by_note))}"
    return "but " + "; ".join(f"{', '.join(ops)}: {number}" for number, ops in by_note.items())


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


if __name__ == "__main__":
    print(page(answers(features())), end="")
