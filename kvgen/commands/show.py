"""kvgen show: a spec as kvgen understands it, and what a page of it looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, TargetName, read_spec
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.ir import AttentionSpec, PageRecord, Spec

KINDS = ("mask", "score", "sink")


def run(
    spec: Annotated[str, typer.Argument(metavar="[SPEC]", help="A TOML file that describes the cache.")] = "",
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a spec instead.")
    ] = False,
    target: TargetName = "cpu",
    as_json: AsJson = False,
) -> None:
    """Show a spec and how a page of it lies in memory (of --target, where the layout is a preset)."""
    if schema:
        from kvgen.commands.schema import spec_schema

        output.print_json(spec_schema())
        return
    if not spec:
        raise ArgumentError("SPEC is missing: give the path of a TOML spec, or --schema")
    from kvgen.commands.describe import bytes_data, record_data, spec_data, term_data
    from kvgen.ir.verify import verify_record
    from kvgen.passes.place import place
    from kvgen.passes.preset import resolve
    from kvgen.resolve import resolve_target

    loaded = resolve(read_spec(spec), resolve_target(target))
    record = place(loaded)
    verify_record(loaded, record)
    if as_json:
        data = spec_data(loaded) | {"terms": term_data(loaded.attention)}
        output.print_json(
            data | {"record": record_data(record), "bytes": bytes_data(loaded, record), "proven": True}
        )
        return
    print_spec(loaded)
    print_record(record)
    print_bytes(bytes_data(loaded, record))


def print_spec(spec: Spec) -> None:
    """Identity, attention and storage."""
    from kvgen.commands.describe import param_text, term_data
    from kvgen.commands.storage_text import raw_text, storage_text

    att, cache = spec.attention, spec.cache
    output.heading(f"{spec.name}  (spec {spec.hash8})")
    words = {kind: [term["what"] for term in term_data(att) if term["kind"] == kind] for kind in KINDS}
    first = f"scale {att.scale:.6g} times q.k"
    facts = {
        "sha256": spec.hash,
        "heads": f"{att.q_heads} query heads over {att.kv_heads} KV heads, {att.group} to 1",
        "rows": f"K {att.head_dim} and V {att.v_head_dim} elements, q and output {att.q_dtype}",
        "scores": "; ".join([first, *words["score"], *words["sink"]]),
        "masks": "; ".join(words["mask"]) or "none: all keys are seen",
        "parameters": "; ".join(map(param_text, att.params)),
        "positions": _positions(att),
        "page": f"{cache.page_size} tokens, planes start on {cache.align} bytes",
        "layout": f"'{cache.layout}'",
        "K": storage_text(cache.k),
        "V": f"the first {att.v_head_dim} elements of K's rows" if cache.alias else storage_text(cache.v),
        "raw": raw_text(cache),
    }
    output.facts({name: text for name, text in facts.items() if text})


def _positions(att: AttentionSpec) -> str:
    """How K is rotated to its position; empty where kvgen rotates nothing."""
    from kvgen.commands.describe import toml_text

    rope = att.rope
    if rope is None:
        return ""
    pairs = "halves" if rope.pairing == "half" else "neighbours"
    when = "when it is appended" if rope.stored == "post" else "whenever it is read"
    own = "".join(f", {key} {toml_text(value)}" for key, value in rope.options)
    part = "K" if rope.dim == att.head_dim else f"the first {rope.dim} elements of K"
    return f"{rope.kind} rope of theta {rope.theta:,.6g}{own} in pairs of {pairs} rotates {part} {when}"


def print_record(record: PageRecord) -> None:
    """The planes as a table and as a picture."""
    from kvgen.commands.describe import payload
    from kvgen.commands.picture import page_picture

    rows = [
        (
            plane.name,
            plane.dtype,
            str(plane.offset),
            payload(plane),
            ", ".join(f"{placed.axis} {placed.stride}" for placed in plane.axes),
        )
        for plane in record.planes + record.raw
    ]
    columns = ("plane", "type", "offset", "bytes a page", "strides in bytes")
    output.table(columns, rows, title="Page record", right=("offset", "bytes a page"))
    output.line()
    for text in page_picture(record):
        output.line(text)


def print_bytes(found: dict[str, Any]) -> None:
    """What a page and a token cost in one layer."""
    factor = found["smaller_than_bf16"]
    than = f"{factor:.2f} times smaller" if factor >= 1 else f"{1 / factor:.2f} times larger"
    than = "as much" if f"{factor:.2f}" == "1.00" else than
    output.heading("Memory, for one layer")
    raw = found.get("raw_row")
    output.facts(
        {
            "page": f"{output.grouped(found['page'])} bytes",
            **({"raw row": f"{output.grouped(raw)} bytes for a page with raw tokens"} if raw else {}),
            "padding": f"{output.grouped(found['padding'])} bytes ({found['padding_percent']:.1f} %)",
            "token": f"{found['token']:,.6g} bytes",
            "as bf16": f"{output.grouped(found['bf16_token'])} bytes a token: this is {than}",
        }
    )
