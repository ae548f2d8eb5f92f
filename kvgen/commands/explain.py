"""kvgen explain: one op of a spec at every stage from the IR to the machine code, with the reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, Pins, SpecPath, TargetName, assembled, chosen_ops, read_spec
from kvgen.errors import ArgumentError
from kvgen.names import told

if TYPE_CHECKING:
    from kvgen.library import Library

Show = Callable[[Any], None]


def run(
    spec: SpecPath,
    op: Annotated[str, typer.Option("--op", metavar="OP", help="append, decode, prefill, ...")] = "decode",
    target: TargetName = "cpu",
    stage: Annotated[
        str,
        typer.Option(
            "--stage", help="ir, record, address, plan, source or resources; without: all but the last."
        ),
    ] = "",
    variant: Annotated[
        str, typer.Option("--variant", help="multi (decode), or the type outside the cache.")
    ] = "",
    pin: Pins = None,
    as_json: AsJson = False,
) -> None:
    """Explain a kernel from the spec to the machine code.

    The stages are IR, page record, addresses, plan, source and resources. Only the last one compiles;
    all others work without compiler, GPU, torch and triton.
    """
    if stage and stage not in STAGES:
        raise ArgumentError(
            f"--stage {stage}: no such stage; {told(stage, STAGES)}There are {', '.join(STAGES)}"
        )
    ops = chosen_ops([op])
    if len(ops) != 1:
        raise ArgumentError(f"--op {op}: explain shows one op at a time")
    loaded = read_spec(spec)
    library = assembled(loaded, target, pin)
    wanted = [stage] if stage else [name for name in STAGES if name != "resources"]
    found = {name: STAGES[name][0](library, ops[0], variant) for name in wanted}
    if as_json:
        about = {"name": loaded.name, "hash": loaded.hash, "target": library.target.name, "op": ops[0]}
        output.print_json(about | found)
        return
    for name, data in found.items():
        if not stage:
            output.heading(f"== {name}: {ops[0]} of {loaded.name} for {library.target.name} ==")
        STAGES[name][1](data)
    if not stage:
        output.line("\nWhat the machine code uses: add --stage resources (compiles).")


def _plan(library: Library, op: str, variant: str) -> Any:
    return library.backend.plan(
        op, library.spec, library.record, library.schedules[op], library.target, variant
    )


def ir_data(library: Library, op: str, variant: str) -> dict[str, Any]:
    """The canonical IR: what the identity is the sha256 of."""
    return library.spec.to_dict() | {"hash": library.spec.hash}


def record(library: Library, op: str, variant: str) -> dict[str, Any]:
    """The page record."""
    from kvgen.commands.describe import record_data

    return record_data(library.record)


def addresses(library: Library, op: str, variant: str) -> list[dict[str, Any]]:
    """Each plane's address as the layout spells it and as it is computed, in stored elements."""
    from kvgen.commands.explain_text import address_data

    made = _plan(library, op, variant)
    return [address_data(plane, made) for plane in library.record.planes]


def plan(library: Library, op: str, variant: str) -> dict[str, Any]:
    """Everything that the template is told."""
    from kvgen.commands.describe import plan_data
    from kvgen.commands.explain_text import decisions
    from kvgen.tune.space import load_space, spec_facts

    made = _plan(library, op, variant)
    space = load_space(library.backend.space(op))
    seed = space.default(library.target, spec_facts(library.spec, library.target))
    origin = "the default" if made.schedule == seed else "tuned or pinned"
    return plan_data(made) | {"schedule_is": origin, "decisions": decisions(made)}


def source(library: Library, op: str, variant: str) -> str:
    """The rendered source."""
    return library.source(op, variant)


def resources(library: Library, op: str, variant: str) -> dict[str, Any]:
    """Facts read from the binary."""
    found = library.resources(op, variant)
    if library.target.interpreted:
        return {"note": "the interpreter compiles nothing"}
    if library.target.backend == "cpu":
        return found
    from kvgen.passes.inspect import faults

    return found | {"faults": "; ".join(faults(op, found, library.spec)) or "none"}


def _show_ir(data: dict[str, Any]) -> None:
    import json

    output.code(json.dumps(data, indent=2), "json")


def _show_record(data: dict[str, Any]) -> None:
    from kvgen.commands.explain_text import record_rows

    columns = ("plane", "type", "axis", "extent", "stride in bytes", "")
    output.line(f"align {data['align']}, a page is {output.grouped(data['page_bytes'])} bytes over all pools")
    output.table(columns, record_rows(data), right=("extent",))


def _show_addresses(data: list[dict[str, Any]]) -> None:
    for plane in data:
        output.heading(f"{plane['plane']}: {plane['unit']} from the start of the plane")
        output.facts(
            {"as laid out": plane["raw"], "simplified": plane["simplified"], "in source": plane["code"]}
        )
        rows = [
            (t["index"], t["stride"], "64-bit" if t["wide"] else "32-bit", t["reason"])
            for t in plane["terms"]
        ]
        output.table(("index", "stride", "width", "because"), rows)


def _show_plan(data: dict[str, Any]) -> None:
    from kvgen.commands.explain_text import simple_answers

    knobs = " ".join(f"{name}={value}" for name, value in data["schedule"].items())
    output.facts(
        {
            "entry": data["entry"],
            "template": data["template"],
            "variant": data["variant"] or "only one",
            "schedule": f"{knobs} ({data['schedule_is']})" if knobs else "nothing to choose",
        }
    )
    output.table(("decision", "choice"), data["decisions"], title="Decisions")
    constants = [(c["name"], str(c["value"]), c["doc"]) for c in data["constants"]]
    output.table(("constant", "value", "meaning"), constants, title="Constants", right=("value",))
    facts = [(f["claim"], f["reason"]) for f in data["facts"]]
    output.table(("fact", "because"), facts, title="Facts")
    args = [
        (a["name"], f"{a['dtype']}*" if a["kind"] == "ptr" else a["kind"], a["doc"]) for a in data["args"]
    ]
    output.table(("argument", "type", "meaning"), args, title="Arguments, in ABI order")
    output.table(("answer", "value"), simple_answers(data["answers"]), title="Answers to the template")


def _show_source(text: str) -> None:
    output.code(text, "python" if "import triton" in text else "cpp")


def _show_resources(data: dict[str, Any]) -> None:
    from kvgen.commands.explain_text import resource_rows

    output.facts(dict(resource_rows(data)))


STAGES: dict[str, tuple[Callable[[Library, str, str], Any], Show]] = {
    "ir": (ir_data, _show_ir),
    "record": (record, _show_record),
    "address": (addresses, _show_addresses),
    "plan": (plan, _show_plan),
    "source": (source, _show_source),
    "resources": (resources, _show_resources),
}
"""Stage -> what computes it, and what prints it."""
