"""kernels: every kernel of a spec for one target, compiled, as files and the entries that describe them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from kvgen.backends.cpu import artifact
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.backends.triton.backend import TritonBackend
from kvgen.backends.triton.kernel import TritonKernel
from kvgen.errors import ToolchainError, UnsupportedError
from kvgen.ir.plan import OPS, KernelPlan
from kvgen.library import Library
from kvgen.passes.abi import check_variant, variants_of
from kvgen.passes.render import render
from kvgen.runtime.manifest import Exported, File

Files = dict[str, bytes]
"""Content by path relative to the package."""


def export_kernels(library: Library) -> tuple[tuple[Exported, ...], Files]:
    """All ops and variants of ``library``; the default variant of each op comes first.

    Raises ``ToolchainError`` for the first that does not compile, ``UnsupportedError`` for a target that has
    no files (the interpreter).
    """
    plans = [library._plan(op, variant) for op, variant in _variants(library)]
    if isinstance(library.backend, CpuBackend):
        return _gather(_cpu(library.backend, plans))
    if isinstance(library.backend, TritonBackend) and not library.target.interpreted:
        kernels = zip(plans, library.backend.compile(plans), strict=True)
        return _gather(_triton(plan, kernel) for plan, kernel in kernels)
    raise UnsupportedError(f"target {library.target.name}: nothing to export; give a CPU or a GPU")


def _variants(library: Library) -> Iterator[tuple[str, str]]:
    for op in OPS:
        default = check_variant(op, "", library.spec)
        for variant in sorted(variants_of(op, library.spec), key=lambda name: name != default):
            yield op, variant


def _gather(parts: Iterator[tuple[Exported, Files]]) -> tuple[tuple[Exported, ...], Files]:
    entries, files = [], Files()
    for entry, own in parts:
        entries.append(entry)
        files |= own
    return tuple(entries), files


def _cpu(backend: CpuBackend, plans: list[KernelPlan]) -> Iterator[tuple[Exported, Files]]:
    for plan, done in zip(plans, backend.compile_outcomes(plans), strict=True):
        if done.path is None:
            raise ToolchainError(f"{plan.op} for {plan.target.name}: {done.message}")
        facts = asdict(artifact.verify(done.path))
        stem = f"cpu/{plan.target.name}/{_stem(plan)}"
        yield _entry(plan, plan.entry, stem, ".cpp", {".so": done.path.read_bytes()}, facts)


def _triton(plan: KernelPlan, kernel: TritonKernel) -> tuple[Exported, Files]:
    resources = kernel.resources()
    facts, binaries = {}, {}
    for part, compiled in zip(kernel.parts, kernel.compiled, strict=True):
        suffix = compiled.binary_path.suffix
        binaries[f"_{part.kernel}{suffix}" if len(kernel.parts) > 1 else suffix] = compiled.binary
        facts[part.kernel] = {
            "toolchain": compiled.toolchain,
            "signature": [list(pair) for pair in compiled.signature],
            "aligned_16": sorted(part.aligned),
            **({} if part.maxnreg is None else {"maxnreg": part.maxnreg}),
            **asdict(compiled.metadata),
            "resources": resources[part.kernel],
        }
    entry = "+".join(part.kernel for part in kernel.parts)
    return _entry(plan, entry, f"triton/{plan.target.name}/{_stem(plan)}", ".py", binaries, facts)


def _entry(
    plan: KernelPlan, entry: str, stem: str, suffix: str, binaries: Mapping[str, bytes], facts: dict[str, Any]
) -> tuple[Exported, Files]:
    files = {stem + suffix: render(plan).encode(), **{stem + end: data for end, data in binaries.items()}}
    source, *rest = (File.of(path, data) for path, data in files.items())
    made = Exported(
        plan.op,
        plan.variant,
        entry,
        plan.args,
        plan.schedule,
        source,
        tuple(rest),
        facts,
        plan.target.features,
    )
    return made, files


def _stem(plan: KernelPlan) -> str:
    return f"{plan.op}_{plan.variant}" if plan.variant else plan.op
