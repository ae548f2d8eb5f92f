"""kvgen generate: write the rendered sources and a manifest into a folder, and touch nothing else there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen import bounded
from kvgen.commands import output
from kvgen.commands.options import (
    AsJson,
    OpNames,
    Pins,
    SpecPath,
    TargetName,
    assembled,
    chosen_ops,
    read_spec,
)
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.ir.plan import KernelPlan
    from kvgen.library import Library

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the manifest's own layout."""


def run(
    spec: SpecPath,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder to write to; made if need be.")],
    target: TargetName = "cpu",
    op: OpNames = None,
    pin: Pins = None,
    all_variants: Annotated[
        bool, typer.Option("--all-variants", help="Also other types outside the cache, and ragged decode.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that kvgen did not write, or that were edited.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the sources of the kernels and a manifest.

    Nothing is compiled. Files that kvgen did not write are neither deleted nor overwritten.
    """
    library = assembled(read_spec(spec), target, pin)
    texts: dict[str, str] = {}
    kernels = []
    for name in chosen_ops(op):
        for variant in variants(library, name) if all_variants else ("",):
            plan = _plan(library, name, variant)
            file = file_name(plan, default=not variant or variant == _plan(library, name, "").variant)
            texts[file] = library.source(name, variant)
            kernels.append(kernel_data(library, plan, file, texts[file]))
    manifest = head_data(library) | {"kernels": kernels}
    write_folder(to, texts, manifest, force=force)
    if as_json:
        output.print_json({"folder": str(to), "files": [*texts, MANIFEST], "manifest": manifest})
        return
    rows = [(k["file"], k["op"], k["variant"] or "-", k["entry"], k["lines"]) for k in kernels]
    output.table(("file", "op", "variant", "entry", "lines"), rows, right=("lines",))
    output.line(
        f"{len(texts)} kernels of {library.spec.name} for {library.target.name} in {to}, with {MANIFEST}"
    )


def _plan(library: Library, op: str, variant: str) -> KernelPlan:
    return library.backend.plan(
        op, library.spec, library.record, library.schedules[op], library.target, variant
    )


def variants(library: Library, op: str) -> tuple[str, ...]:
    """Every variant of ``op``; the default comes first."""
    from kvgen.passes.abi import VARIANTS, check_variant

    default = check_variant(op, "", library.spec)
    return tuple(sorted(VARIANTS[op], key=lambda name: name != default))


def file_name(plan: KernelPlan, *, default: bool) -> str:
    """``decode.cpp``; ``decode_multi.cpp`` for a variant that is not the default."""
    suffix = "py" if plan.target.backend == "triton" else "cpp"
    return f"{plan.op}{'' if default else f'_{plan.variant}'}.{suffix}"


def head_data(library: Library) -> dict[str, Any]:
    """What the manifest says of the whole folder."""
    from kvgen import __version__
    from kvgen.commands.describe import record_data, spec_data, target_data

    return {
        "format": FORMAT,
        "generator": f"kvgen {__version__}",
        **spec_data(library.spec),
        "target": target_data(library.target),
        "record": record_data(library.record),
    }


def kernel_data(library: Library, plan: KernelPlan, file: str, text: str) -> dict[str, Any]:
    """What the manifest says of one kernel: how to build it and how to call it."""
    from kvgen.commands.describe import plain, plan_data

    data = plan_data(plan)
    found = {
        "file": file,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "lines": text.count("\n"),
        **{key: data[key] for key in ("op", "variant", "entry", "schedule", "args", "constants")},
    }
    if plan.target.backend == "cpu":
        from kvgen.backends.cpu.backend import CpuBackend
        from kvgen.backends.cpu.job import BASE_FLAGS

        job = CpuBackend().job(plan)
        return found | {"flags": [*BASE_FLAGS, job.opt, f"-ffp-contract={job.fp_contract}", *job.flags]}
    return found | {"launches": plain(plan.answers["kernels"])}


def write_folder(folder: Path, texts: Mapping[str, str], manifest: dict[str, Any], *, force: bool) -> None:
    """Write every file whole or not at all. Entries of an earlier run for the same spec and target stay.

    ``ArgumentError`` before anything is written where a file is not kvgen's own (unless ``force``).
    """
    from kvgen.paths import write_atomic

    folder.mkdir(parents=True, exist_ok=True)
    before = read_manifest(folder / MANIFEST)
    known = {kernel["file"]: kernel for kernel in before.get("kernels", ())}
    same = all(before.get(key) == manifest[key] for key in ("hash", "target"))
    foreign = [name for name in texts if _is_foreign(folder / name, known.get(name, {}).get("sha256"))]
    if not before and (folder / MANIFEST).exists():
        foreign.append(MANIFEST)
    if foreign and not force:
        raise ArgumentError(
            f"{folder}: not written by kvgen, or edited since: {', '.join(foreign)}; "
            "give another folder, or --force to overwrite them"
        )
    left = [name for name in known if name not in texts and (folder / name).exists()]
    if left and not same and not force:
        about = f"{before.get('name')} ({str(before.get('hash'))[:8]}) for {before['target'].get('name')}"
        raise ArgumentError(
            f"{folder}: holds {', '.join(left)} of {about}; give another folder, or --force to add to it"
        )
    kept = [known[name] for name in left] if same else []
    manifest["kernels"] = sorted([*kept, *manifest["kernels"]], key=lambda kernel: str(kernel["file"]))
    for name, text in texts.items():
        write_atomic(folder / name, text)
    # Last, so that a manifest never names a file that is not there yet.
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def read_manifest(path: Path) -> dict[str, Any]:
    """An earlier run's manifest; empty where there is none or the file is not one of ours."""
    try:
        data = bounded.read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return {}
    kernels = data.get("kernels")
    if not isinstance(kernels, list) or not isinstance(data.get("target"), dict):
        return {}
    return data if all(isinstance(k, dict) and isinstance(k.get("file"), str) for k in kernels) else {}


def _is_foreign(path: Path, sha256: str | None) -> bool:
    """Whether the file at ``path`` exists and is not what kvgen last wrote there."""
    try:
        return hashlib.sha256(bounded.read(path, bounded.JSON_BYTES)).hexdigest() != sha256
    except FileNotFoundError:
        return False
    except ValueError:  # no file at all, or one that no kernel is as large as
        return True
