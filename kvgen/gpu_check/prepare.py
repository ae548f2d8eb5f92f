"""prepare: compile what a run on a GPU will need, on a machine that has none.

For each spec and op the default schedule in every variant, and the schedules that the tuner's model ranks
best in the variant that a library compiles first (of decode both, since a winner serves both).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import kvgen
from kvgen import paths
from kvgen.backends.triton.arch import gpu_arch
from kvgen.backends.triton.backend import TritonBackend
from kvgen.backends.triton.kernel import TritonKernel
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.gpu_check import folder as folders
from kvgen.gpu_check import recorded
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import OPS, KernelPlan
from kvgen.ir.verify import verify_record
from kvgen.passes.abi import VARIANTS, check_variant
from kvgen.passes.place import place
from kvgen.passes.preset import resolve as resolve_preset
from kvgen.resolve import resolve_target
from kvgen.runtime.manifest import File
from kvgen.tune.defaults import default_in
from kvgen.tune.journal import Journal
from kvgen.tune.key import key_of
from kvgen.tune.outcome import Outcome, Step
from kvgen.tune.search import Search
from kvgen.tune.space import space_of, spec_facts

MOST = {"decode": 8, "prefill": 6, "append": 3, "copy": 3, "gather": 3, "merge": 3}
"""Schedules of each op that race, the default among them."""

Say = Callable[[str], None]


def prepare(
    folder: Path,
    specs: Sequence[Spec],
    target: str,
    *,
    most: Mapping[str, int] = MOST,
    ops: Sequence[str] = OPS,
    also: Mapping[str, Sequence[Schedule]] = MappingProxyType({}),
    effort: str = "quick",
    say: Say = lambda text: None,
) -> folders.Manifest:
    """Compile candidates of ``specs`` into ``folder``.

    ``most``: schedules of each op; ``also``: schedules that are prepared whatever the model says of them.
    Raises ``ArgumentError`` without specs, ``UnsupportedError`` for a target without cubins.
    """
    resolved = resolve_target(target)
    if resolved.backend != "triton" or resolved.interpreted or gpu_arch(resolved.name).backend != "cuda":
        raise UnsupportedError(
            f"--target {target}: the check launches cubins; give an NVIDIA target, as sm_90"
        )
    if not specs:
        raise ArgumentError("SPEC: none given; the check needs at least one TOML file")
    paths.make(folder)
    backend = TritonBackend()
    prepared, plans, toolchain = [], {}, ""
    for unresolved in specs:
        spec = resolve_preset(unresolved, resolved)
        record = place(spec)
        verify_record(spec, record)
        wanted: list[tuple[KernelPlan, bool, float | None]] = []
        digests = {}
        for op in ops:
            say(f"{spec.name}: {op}: rank schedules")
            space = space_of(op, resolved)
            key = key_of(op, spec, resolved, {}, space)
            digests[op] = (key.templates, key.space)
            chosen = _chosen(op, spec, record, resolved, backend, most[op], effort)
            chosen += [(schedule, None, False) for schedule in also.get(op, ())]
            for schedule, figure, default in chosen:
                for variant in _variants(op, spec, default):
                    plan = backend.plan(op, spec, record, schedule, resolved, variant)
                    wanted.append((plan, default, figure))
        say(f"{spec.name}: compile {len(wanted)} kernels")
        kernels = backend.compile([plan for plan, _, _ in wanted])
        candidates = []
        for (plan, default, figure), kernel in zip(wanted, kernels, strict=True):
            toolchain = kernel.compiled[0].toolchain
            as_json = recorded.to_json(plan)
            made = folders.Candidate(
                recorded.from_json(as_json, spec), default, figure, tuple(_binaries(folder, kernel))
            )
            plans[id(made)] = as_json
            candidates.append(made)
        prepared.append(folders.Prepared(spec, record, digests, tuple(candidates)))
    manifest = folders.Manifest(kvgen.__version__, resolved.name, toolchain, tuple(prepared))
    folders.write(folder, manifest, plans)
    return manifest


def _chosen(
    op: str, spec: Spec, record: PageRecord, target: Target, backend: TritonBackend, most: int, effort: str
) -> list[tuple[Schedule, float | None, bool]]:
    """(schedule, model's figure, whether it is the default): the default, then the best predictions."""
    space, facts = space_of(op, target), spec_facts(spec, target)
    default = default_in(space, op, spec, target, {})
    if most <= 1 or not space.knobs:
        return [(default, None, True)]
    search = Search(spec, record, target, backend, effort=effort, progress=_quiet)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            journal = Journal(Path(scratch) / "trials.jsonl", {})
            found = search.run(op, space, facts, default, {}, [], journal)
    finally:
        search.close()
    figures = {t.schedule: min(t.times.values()) for t in found.trials if t.outcome is Outcome.OK and t.times}
    ranked = sorted((s for s in figures if s != default), key=lambda s: (figures[s], space.order(s)))
    return [(default, figures.get(default), True), *((s, figures[s], False) for s in ranked[: most - 1])]


def _quiet(step: Step) -> None:
    """A search reports no progress here; what takes long is told by op."""


def _variants(op: str, spec: Spec, default: bool) -> tuple[str, ...]:
    if default or op == "decode":
        first = check_variant(op, "", spec)
        return tuple(sorted(VARIANTS[op], key=lambda name: name != first))
    return (check_variant(op, "", spec),)


def _binaries(folder: Path, kernel: TritonKernel) -> list[folders.Binary]:
    found = []
    for compiled in kernel.compiled:
        data, facts = compiled.binary, compiled.metadata
        file = File.of("", data)
        file = File.of(f"cubin/{file.sha256[:24]}.cubin", data)
        path = folder / file.path
        path.parent.mkdir(exist_ok=True)
        paths.write_atomic(path, data)
        found.append(
            folders.Binary(
                facts.name, compiled.signature, facts.num_warps, facts.shared, facts.global_scratch_size, file
            )
        )
    return found
