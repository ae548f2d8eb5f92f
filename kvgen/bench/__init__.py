"""bench: kvgen's kernels against other libraries and the read limit of the same memory, in one process.

``bench(specs)`` -> ``Report``. Every contender gets the same values, is checked before it is timed, and takes
turns with the others on memory that no cache still holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvgen.bench import cases as known
from kvgen.bench.cases import Case
from kvgen.bench.contender import Shape
from kvgen.bench.entries import Say
from kvgen.bench.facts import gather as gather_facts
from kvgen.bench.measure import Settings, measure
from kvgen.bench.peers.registry import Peer
from kvgen.bench.report import Report
from kvgen.builder import assemble, build
from kvgen.ir import Spec
from kvgen.library import Library

__all__ = ["Case", "Report", "Settings", "bench"]


def bench(
    specs: Sequence[Spec],
    cases: Sequence[Case] | None = None,
    *,
    peers: Sequence[Peer] = (),
    threads: int | None = None,
    settings: Settings | None = None,
    tune: str = "cache",
    schedule: Mapping[str, Mapping[str, Any]] | None = None,
    targets: Sequence[str] = (),
    variants: bool = False,
    formats: bool = False,
    say: Say = lambda stage, done, total, note: None,
) -> Report:
    """Time the specs on the CPU at hand; those of one attention (heads, sizes, masks) take turns.

    ``targets``: rows of the CPU, each a contender that is called by its row; none is the best one.
    ``cases`` None: the default set. ``threads``: default all usable, whatever ``settings`` says. Libraries
    are built as ``kvgen.build`` does. ``variants``: instead of the specs against each other, each registered
    mask, score and sink against the plain kernel of each spec (``kvgen.bench.variants``), without peers or
    tuned schedules; ``formats``: likewise each registered codec against bf16 (``kvgen.bench.formats``).
    Raises what ``build`` raises, and ``ArgumentError`` for bad threads.
    """
    from kvgen.models.threads import using_threads

    with using_threads(threads) as count:
        settings = replace(settings or Settings(), threads=count)
        if variants or formats:
            return _against_plain(specs, cases, settings, schedule, targets, say, formats=formats)
        libraries: dict[str, Library] = {}
        wanted = _on_rows(specs, targets)
        for at, (name, (spec, target)) in enumerate(wanted.items()):
            say("compiling", at, len(wanted), name)
            libraries[name] = build(spec, target, tune=tune, schedule=schedule)
        found = []
        for group in _groups(libraries):
            for case in known.CASES.values() if cases is None else cases:
                found.append(measure(case, group, peers, settings, say))
        facts = gather_facts(count)
        hashes = {name: library.spec.hash for name, library in libraries.items()}
        return Report(facts, hashes, settings.waited() is not None, tuple(found))


def _against_plain(
    specs: Sequence[Spec],
    cases: Sequence[Case] | None,
    settings: Settings,
    schedule: Mapping[str, Mapping[str, Any]] | None,
    targets: Sequence[str],
    say: Say,
    *,
    formats: bool,
) -> Report:
    from kvgen.bench.formats import measure_formats
    from kvgen.bench.variants import measure_variants

    def make(spec: Spec, target: str) -> Library:
        # Compiled when first called: of six ops a case needs two.
        return assemble(spec, target, tune="off", schedule=schedule)

    chosen = [known.CASES[name] for name in known.VARIANT_CASES] if cases is None else cases
    named, rows = _on_rows(specs, targets), measure_formats if formats else measure_variants
    found = [
        report
        for name, (spec, target) in named.items()
        for report in rows(replace(spec, name=name), chosen, settings, say, partial(make, target=target))
    ]
    hashes = {name: spec.hash for name, (spec, _) in named.items()}
    return Report(gather_facts(settings.threads), hashes, settings.waited() is not None, tuple(found))


def _on_rows(specs: Sequence[Spec], targets: Sequence[str]) -> dict[str, tuple[Spec, str]]:
    """Each spec on each target, by a name that says both; without targets on the best row."""
    named = names_of(specs)
    if not targets:
        return {name: (spec, "cpu") for name, spec in named.items()}
    return {f"{name} {target}": (spec, target) for name, spec in named.items() for target in targets}


def names_of(specs: Sequence[Spec]) -> dict[str, Spec]:
    """The specs by name; the hash tells those of one name apart, and one given twice is one."""
    found: dict[str, Spec] = {}
    for spec in specs:
        taken = found.get(spec.name)
        name = spec.name if taken is None or taken.hash == spec.hash else f"{spec.name} {spec.hash8}"
        found[name] = spec
    return found


def _groups(libraries: Mapping[str, Library]) -> list[dict[str, Library]]:
    """Libraries that can be compared: those of equal shape."""
    groups: list[tuple[Shape, dict[str, Library]]] = []
    for name, library in libraries.items():
        shape = Shape.of(library.spec)
        same = next((group for other, group in groups if other == shape), None)
        if same is None:
            groups.append((shape, {name: library}))
        else:
            same[name] = library
    return [group for _, group in groups]
