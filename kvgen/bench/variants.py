"""variants: what each registered mask, score term and sink costs beside the plain kernel of the same spec.

Rows come from the registry: a definition registered in a test has one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgen.bench.cases import Case
from kvgen.bench.contender import Shape
from kvgen.bench.entries import Say
from kvgen.bench.measure import Settings, measure
from kvgen.bench.report import CaseReport
from kvgen.errors import ArgumentError, Diagnostic, SpecError, UnsupportedError
from kvgen.ir import Spec
from kvgen.library import Library
from kvgen.passes.validate import load_spec
from kvgen.variants import Definition, definitions

MORE: tuple[Mapping[str, Any], ...] = ({"window": 512},)
"""Rows beside the examples of definitions, which suit tests: a window as models have it."""


LONGEST = 40
"""Characters of a value in a name."""


@dataclass(frozen=True)
class Variant:
    """A spec with one definition switched on, and the one it is held against."""

    name: str
    """``soft_cap = 20.0``."""
    kind: str
    """``mask``, ``score`` or ``sink``."""
    beside: str
    """Name of the plain kernel: the spec's, and what else was changed in it."""
    plain: Spec
    """The spec without it, as causal as the variant is: hiding the future is another mask's merit."""
    spec: Spec


def variants_of(spec: Spec) -> tuple[list[Variant], dict[str, str]]:
    """A variant for each definition's example and for ``MORE``; and why others cannot stand in ``spec``."""
    found, refused = [], {}
    for definition, keys in _rows():
        name = _text(definition.name, keys[definition.name])
        try:
            made = _variant(spec, definition, keys, name)
        except SpecError as error:
            refused[name] = "; ".join(map(_reason, error.diagnostics))
            continue
        if made.spec.hash != made.plain.hash:
            found.append(made)
    return found, refused


def _rows() -> Iterator[tuple[Definition, Mapping[str, Any]]]:
    for definition in (each for kind in ("mask", "score", "sink") for each in definitions(kind)):
        yield definition, definition.example
        yield from ((definition, keys) for keys in MORE if definition.name in keys)


def _variant(spec: Spec, definition: Definition, keys: Mapping[str, Any], name: str) -> Variant:
    causal = bool(keys.get("causal", spec.attention.causal))
    # An example may need company: window_right stands with a window, which the plain kernel has as well.
    company = {key: value for key, value in keys.items() if key not in (definition.name, "causal")}
    alone = {"causal": causal and definition.name != "causal", **company}
    own = spec.to_dict()["attention"]
    changed = [_text(key, value) for key, value in alone.items() if own.get(key) != value]
    beside = f"{spec.name}: {', '.join(changed)}" if changed else spec.name
    return Variant(name, definition.kind, beside, _with(spec, alone), _with(spec, {"causal": causal, **keys}))


def _with(spec: Spec, keys: Mapping[str, Any]) -> Spec:
    raw = spec.to_dict()
    return load_spec({**raw, "attention": {**raw["attention"], **keys}})


def _text(key: str, value: object) -> str:
    """``window = 33``; long expressions are cut."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{key} = {text if len(text) <= LONGEST else text[:LONGEST] + '...'}"


def _reason(found: Diagnostic) -> str:
    return f"{found.path}: {found.reason}"


def measure_variants(
    spec: Spec,
    cases: Sequence[Case],
    settings: Settings,
    say: Say,
    make: Callable[[Spec], Library],
) -> Iterator[CaseReport]:
    """Each variant beside its plain kernel, case by case, in turns of one run.

    ``make`` gives their libraries, which should have schedules of one kind: a tuned winner of one of the two
    would be told as the other's cost.

    The first row of a report is the plain kernel's and the second the variant's. What a case refuses (a tree
    of too many queries) is a report without rows that says why. Raises ``ArgumentError`` for a case that
    does not attend.
    """
    for case in cases:
        if not case.q_lens:
            raise ArgumentError(f"--case {case.name}: masks and scores take part in decode and prefill only")
    found, refused = variants_of(spec)
    libraries: dict[str, Library] = {}

    def library(wanted: Spec) -> Library:
        if wanted.hash not in libraries:
            libraries[wanted.hash] = make(wanted)
        return libraries[wanted.hash]

    for case in cases:
        for variant in found:
            pair = {
                variant.beside: library(variant.plain),
                f"{spec.name}: {variant.name}": library(variant.spec),
            }
            try:
                made = measure(case, pair, (), settings, say)
            except (UnsupportedError, ArgumentError) as error:
                yield none_of(case, variant.plain, variant.name, str(error))
                continue
            yield replace(made, case=f"{case.name}: {variant.name}")
        for name, reason in refused.items():
            yield none_of(case, spec, name, reason)


def none_of(case: Case, spec: Spec, name: str, reason: str) -> CaseReport:
    return CaseReport(
        case=f"{case.name}: {name}",
        title=str(case),
        shape=str(Shape.of(spec)),
        rounds=0,
        limits=(),
        peaks={},
        mode=None,
        scaling=None,
        other_mode_rounds=0,
        rows=(),
        left_out={name: reason},
        stolen=None,
    )
