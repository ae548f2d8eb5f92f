"""The wording of ``kvgen explain``: addresses as formulas, plans and resources as rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvgen.commands.output import grouped
from kvgen.ir import Plane
from kvgen.ir.expression import Load, Node, names_of
from kvgen.ir.plan import KernelPlan
from kvgen.passes.address import Address, Term, address, plane_facts, simplify
from kvgen.passes.lower import fold_site
from kvgen.passes.print_terms import print_triton
from kvgen.passes.printers import print_python
from kvgen.passes.terms import active, masking, scoring

DIMS = ("page", "head", "tok", "d")

SITES = {
    "none": "nothing to scale: plain values",
    "score_scale": "one factor for all scores of a head",
    "score_column": "a factor for each key, on its column of scores",
    "output": "one factor for a head's output",
    "weight_column": "a factor for each key, on its column of weights",
}
"""``FoldSite.site`` in words."""

LONGEST_ANSWER = 100
"""Characters of an answer that are shown; longer ones are texts for the template, visible in the source."""


def address_data(plane: Plane, plan: KernelPlan) -> dict[str, Any]:
    """One plane's address before and after simplification, with each term's proven width.

    ``code`` is what the plan prints, which may count in words of several elements.
    """
    raw = address(plane)
    simple = simplify(raw, plane_facts(plane))
    used, names = plan.addresses.get(plane.name, simple), {dim: dim for dim in DIMS}
    return {
        "plane": plane.name,
        "unit": plane.unit,
        "raw": formula(raw),
        "simplified": formula(simple),
        "code": used.triton(**names) if plan.target.backend == "triton" else used.c(**names),
        "terms": [
            {
                "dim": term.dim,
                "index": print_python(term.index, {}),
                "stride": _stride(term),
                "wide": term.wide,
                "limit": term.limit,
                "reason": _width_reason(term),
            }
            for term in simple.terms
        ],
    }


def formula(found: Address) -> str:
    """The address as a sum, with constant strides as numbers."""
    parts = [
        print_python(term.index, {}) + ("" if term.stride == 1 else f" * {_stride(term)}")
        for term in found.terms
    ]
    return " + ".join(parts) or "0"


def _stride(term: Term) -> str:
    return term.stride_name if term.stride is None else str(term.stride)


def _width_reason(term: Term) -> str:
    if term.limit is None:
        return "page ids and strides are passed at run time"
    return f"at most {grouped(term.limit)}, {'not ' if term.wide else ''}below 2**31"


def decisions(plan: KernelPlan) -> list[tuple[str, str]]:
    """What a reader asks first: where scales enter, how d is cut, what is masked."""
    if plan.op not in ("decode", "prefill"):
        return []
    rows = []
    for side in ("k", "v"):
        fold = fold_site(plan.spec, side)
        heads = ", by head" if fold.per_head else ""
        rows.append((f"{side.upper()} scale enters as", f"{SITES[fold.site]}{heads}"))
    answers, att = plan.answers, plan.spec.attention
    if "k_parts" in answers:
        for side in ("k", "v"):
            parts = " + ".join(
                str(p.width) if p.valid == p.width else f"{p.valid} of {p.width}"
                for p in answers[f"{side}_parts"]
            )
            rows.append((f"{side.upper()} d-parts", parts))
    elif "k_step" in answers:
        tail = f" and {answers['k_tail']} in a padded one" if answers["k_tail"] else ""
        vectors = answers["k_full"] // answers["k_step"]
        rows.append(("K d-parts", f"{att.head_dim} = {vectors} vectors of {answers['k_step']}{tail}"))
        chunks = " + ".join(f"{c['count']}{' padded' if c['tail'] else ''}" for c in answers["v_chunks"])
        rows.append(("V d-parts", f"{att.v_head_dim} in chunks of {chunks} vectors kept in registers"))
    masks = ", ".join(found.name for found, _ in active(att, "mask")) or "none"
    return [*rows, ("mask terms", masks), *expressions(plan)]


def expressions(plan: KernelPlan) -> list[tuple[str, str]]:
    """Predicate, bounds and score of the kernel, as its printers get them."""
    seen = masking(plan.spec, single=plan.variant == "single", prefix=plan.variant == "prefix")
    named = {
        "a key is seen where": seen.predicate,
        "first key of a block": seen.lo,
        "one past its last key": seen.hi,
        "first key seen by all": seen.full_lo,
        "one past the last of those": seen.full_hi,
    }
    rows = [(name, _plain(node)) for name, node in named.items() if node is not None]
    terms = scoring(plan.spec)
    return rows if terms is None else [*rows, ("score, base 2", _plain(terms.node))]


def _plain(node: Node) -> str:
    """An expression with its own names."""

    def load(found: Load) -> str:
        return f"{found.param}[{', '.join(map(_plain, found.index))}]"

    return print_triton(node, {name: name for name in names_of(node)}, load).replace("tl.", "")


def record_rows(data: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """One row for each axis of each plane of ``record_data``."""
    for plane in data["planes"]:
        head = (plane["name"], plane["dtype"])
        yield (*head, "start", "", _extent(plane["offset"]), f"in pool {plane['pool']}")
        for axis in plane["axes"]:
            fixed = "constant" if axis["constant"] else "passed at run time"
            yield ("", "", axis["axis"], str(axis["extent"]), _extent(axis["stride"]), fixed)


def _extent(data: Mapping[str, int]) -> str:
    if not data["per_page"]:
        return str(data["fixed"])
    return f"{data['fixed']} + " * bool(data["fixed"]) + f"{data['per_page']} * num_pages"


def simple_answers(answers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The answers short enough for a row."""
    rows = []
    for name, value in answers.items():
        items = value if isinstance(value, list) else [value]
        text = ", ".join(map(str, items))
        if not any(isinstance(item, Mapping) for item in items) and len(text) <= LONGEST_ANSWER:
            rows.append((name, text.replace("\n", " ") or "(empty)"))
    return rows


def resource_rows(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts of a binary as (dotted name, text)."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and all(isinstance(item, int) for item in value.values()):
            yield path, ", ".join(f"{count} x {key}" for key, count in value.items()) or "none"
        elif isinstance(value, Mapping):
            yield from resource_rows(value, f"{path}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield path, ", ".join(map(str, value)) or "none"
        else:
            yield path, grouped(value) if type(value) is int else str(value)
