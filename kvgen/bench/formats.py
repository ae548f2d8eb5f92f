"""formats: what each registered codec costs beside bf16 in the same spec.

Rows come from the registry: a codec registered in a test has one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgen.bench.cases import Case
from kvgen.bench.entries import Say
from kvgen.bench.measure import Settings, measure
from kvgen.bench.report import CaseReport
from kvgen.bench.variants import none_of
from kvgen.errors import ArgumentError, SpecError, UnsupportedError
from kvgen.ir import Spec
from kvgen.ir.codec import CODECS
from kvgen.library import Library
from kvgen.passes.validate import load_spec

BF16: Mapping[str, Any] = {"format": "bf16"}
AFFINE: Mapping[str, Any] = {"affine": True, "scale_dtype": "f16"}
CHANNEL: Mapping[str, Any] = {"head": 1, "tok": 32, "d": 1}
BLOCK: Mapping[str, Any] = {"head": 1, "tok": 1, "d": 32}

MORE: Mapping[str, Mapping[str, Any]] = {
    "int8 affine": {"k": {"format": "int8", "affine": True}},
    **{
        f"KIVI {name}": {
            "k": {"format": name, **AFFINE, "group": CHANNEL},
            "v": {"format": name, **AFFINE, "group": BLOCK},
            "keep_last": 32,
        }
        for name in ("int4", "int2")
    },
}
"""Rows beside the codecs' examples, as keys of [cache]: what papers combine."""


@dataclass(frozen=True)
class FormatRow:
    """A spec with K and V in one storage, and the same with both in bf16."""

    name: str
    plain: Spec
    spec: Spec


def formats_of(spec: Spec) -> tuple[list[FormatRow], dict[str, str]]:
    """A row for each codec's example and each of ``MORE``; and why others cannot stand in ``spec``."""
    examples = {
        codec.name: {"k": {"format": codec.name, **codec.example}}
        for codec in CODECS.values()
        if codec.name != BF16["format"]
    }
    plain = _stored(spec, {"k": BF16})
    found, refused = [], {}
    for name, keys in {**examples, **MORE}.items():
        try:
            found.append(FormatRow(name, plain, _stored(spec, keys)))
        except SpecError as error:
            refused[name] = "; ".join(f"{found.path}: {found.reason}" for found in error.diagnostics)
    return found, refused


def _stored(spec: Spec, keys: Mapping[str, Any]) -> Spec:
    """``spec`` with these keys of [cache], V as K where they do not say."""
    raw = spec.to_dict()
    own = {key: raw["cache"][key] for key in ("page_size", "layout", "align") if key in raw["cache"]}
    v = {"alias": "k"} if spec.cache.alias else keys["k"]
    return load_spec({**raw, "cache": {**own, "v": v, **keys}})


def measure_formats(
    spec: Spec,
    cases: Sequence[Case],
    settings: Settings,
    say: Say,
    make: Callable[[Spec], Library],
) -> Iterator[CaseReport]:
    """Each codec beside bf16, case by case, in turns of one run; the first row of a report is bf16's.

    ``make`` gives their libraries, which should have schedules of one kind. What is refused is a
    report without rows that says why.
    """
    rows, refused = formats_of(spec)
    libraries: dict[str, Library] = {}

    def library(wanted: Spec) -> Library:
        if wanted.hash not in libraries:
            libraries[wanted.hash] = make(wanted)
        return libraries[wanted.hash]

    for case in cases:
        for row in rows:
            if row.spec.hash == row.plain.hash:
                continue
            try:
                pair = {
                    f"{spec.name}: bf16": library(row.plain),
                    f"{spec.name}: {row.name}": library(row.spec),
                }
                made = measure(case, pair, (), settings, say)
            except (UnsupportedError, ArgumentError) as error:
                yield none_of(case, row.plain, row.name, str(error))
                continue
            yield replace(made, case=f"{case.name}: {row.name}")
        for name, reason in refused.items():
            yield none_of(case, spec, name, reason)
