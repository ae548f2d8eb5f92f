"""kvgen bench: kvgen's kernels against other libraries and the memory's read limit, in one run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.commands.options import AsJson, Pins, read_spec
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.bench.cases import Case

SpecPaths = Annotated[
    list[str] | None, typer.Argument(metavar="SPEC...", help="TOML files that describe caches.")
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME|FOLDER", help="Bench a real model instead: see kvgen run."),
]
Pages = Annotated[
    list[str] | None,
    typer.Option("--pages", metavar="KIND", help="With --model: f32 (default), bf16, int8; may be repeated."),
]
CaseNames = Annotated[
    list[str] | None,
    typer.Option("--case", "-c", metavar="NAME", help="Only this case, or all of an op; may be repeated."),
]
ListCases = Annotated[bool, typer.Option("--list-cases", help="Show the cases and exit.")]
Batch = Annotated[
    list[int] | None,
    typer.Option("--batch", min=1, help="A case of your own: requests, 8; may be repeated. A model: 1, 8."),
]
Context = Annotated[
    int | None,
    typer.Option("--context", min=1, help="Keys of each request, 4096; with --model the prompt's, 128."),
]
Queries = Annotated[
    int | None,
    typer.Option("--queries", min=1, help="Queries of each request, 1; more than 16 of them are a prefill."),
]
NewTokens = Annotated[int | None, typer.Option("--max-tokens", min=2, help="With --model: new tokens, 32.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: all usable.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", min=3, help="Turns that each contender takes: 15; with --model 3.")
]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", min=0.1, help="Budget of a case's samples, 8: slow contenders get fewer."),
]
PeerNames = Annotated[
    list[str] | None,
    typer.Option(
        "--peers", metavar="NAME", help="Only these other libraries (commas, or all); see --list-peers."
    ),
]
NoPeers = Annotated[bool, typer.Option("--no-peers", help="kvgen and the read limit only.")]
ListPeers = Annotated[
    bool, typer.Option("--list-peers", help="Show other libraries, what is installed, and exit.")
]
Variants = Annotated[
    bool,
    typer.Option(
        "--variants", help="Time each mask, score and sink against the plain kernel of SPEC instead."
    ),
]
Formats = Annotated[
    bool, typer.Option("--formats", help="Time each registered format against bf16 in SPEC instead.")
]
Compare = Annotated[
    str | None,
    typer.Option("--compare", metavar="OLD.json", help="Show what changed since an earlier --json."),
]
Plot = Annotated[
    str | None, typer.Option("--plot", metavar="FILE.svg|png|pdf", help="Draw times as bars, fastest first.")
]
GpuCheck = Annotated[
    str | None,
    typer.Option(
        "--gpu-check",
        metavar="DIR",
        help="Run the prepared check of a GPU in DIR instead: minutes, no compiler.",
    ),
]
Prepare = Annotated[
    bool,
    typer.Option("--prepare", help="With --gpu-check: compile what a check of SPEC... needs into DIR."),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "-t",
        metavar="NAME",
        help="cpu (default) or another row of it; several. --prepare: a GPU.",
    ),
]
Overhead = Annotated[
    bool,
    typer.Option("--overhead", help="Time what a call costs beside its memory instead, from Python and C."),
]


def run(
    specs: SpecPaths = None,
    case: CaseNames = None,
    list_cases: ListCases = False,
    batch: Batch = None,
    context: Context = None,
    queries: Queries = None,
    threads: Threads = None,
    rounds: Rounds = None,
    seconds: Seconds = None,
    peers: PeerNames = None,
    no_peers: NoPeers = False,
    list_peers: ListPeers = False,
    variants: Variants = False,
    formats: Formats = False,
    pin: Pins = None,
    compare: Compare = None,
    plot: Plot = None,
    model: ModelName = None,
    pages: Pages = None,
    new_tokens: NewTokens = None,
    gpu_check: GpuCheck = None,
    prepare: Prepare = False,
    target: Targets = None,
    overhead: Overhead = False,
    as_json: AsJson = False,
) -> None:
    """Time specs on this CPU against other libraries and the memory's read limit.

    Contenders take turns in one process, on the same values and on memory that no cache still holds. Outputs
    are checked before anything is timed, and samples in which a thread waited for a core do not count.

    --json prints one document; --json FILE.json writes it there and prints the tables. --compare reads one.

    With --model: decoded tokens a second of the whole model, against transformers' eager and SDPA.
    """
    if list_cases or list_peers:
        from kvgen.commands import bench_lists

        bench_lists.run(list_cases, list_peers, as_json=as_json)
        return
    if target and (overhead or model is not None or (gpu_check is not None and not prepare)):
        other = "--overhead" if overhead else "--model" if model is not None else "--gpu-check"
        row = (
            "the device that the check was prepared for"
            if other == "--gpu-check"
            else "the best row of this CPU"
        )
        raise ArgumentError(f"--target {target[0]}: {other} measures {row}; leave it out")
    if prepare and target and len(target) > 1:
        raise ArgumentError(f"--target {target[1]}: a check is prepared for one GPU; give one")
    if prepare and gpu_check is None:
        raise ArgumentError(
            "--prepare: says how --gpu-check DIR is meant; give --gpu-check DIR, or leave it out"
        )
    if gpu_check is not None:
        # Imported by name: it brings what only a machine with a GPU needs.
        importlib.import_module("kvgen.commands.gpu_check").run(
            gpu_check,
            specs or [],
            prepare=prepare,
            target=(target or ["sm_90"])[0],
            seconds=seconds,
            as_json=as_json,
        )
        return
    if overhead:
        from kvgen.commands.bench_overhead import run as run_overhead

        run_overhead(specs or [], threads=threads, as_json=as_json)
        return
    if model is not None:
        if specs:
            raise ArgumentError(f"SPEC {specs[0]}: --model makes its own spec; give one of the two")
        from kvgen.commands.bench_model import run_model

        run_model(
            model,
            pages=pages,
            batches=batch or [1, 8],
            prompt=context or 128,
            new_tokens=new_tokens or 32,
            threads=threads,
            rounds=rounds or 3,
            as_json=as_json,
        )
        return
    for option, value in (("--pages", pages), ("--max-tokens", new_tokens)):
        if value:
            raise ArgumentError(f"{option}: only a model has one; give --model as well")
    paths, file = json_file(specs or [], as_json)
    if not paths:
        raise ArgumentError("SPEC: none given; give a TOML file, or --model")
    if variants and formats:
        raise ArgumentError("--formats: --variants compares other things; give one of the two")
    alone = "--variants" if variants else "--formats" if formats else ""
    if alone and peers:
        raise ArgumentError(f"--peers {peers[0]}: {alone} compares kvgen with itself; give one of the two")
    cases = chosen_cases(case, batch, context, queries, variants=bool(alone))
    from kvgen.bench import Settings
    from kvgen.commands.bench_run import run_specs

    run_specs(
        [read_spec(path) for path in paths],
        cases,
        Settings(rounds=rounds or 15, seconds=seconds or (2.0 if alone else 8.0)),
        variants=variants,
        formats=formats,
        threads=threads,
        peers=peers or [],
        no_peers=no_peers or bool(alone),
        pins=pin,
        targets=runnable(target or []),
        against=compare,
        picture=plot,
        file=file,
        as_json=as_json and file is None,
    )


def runnable(targets: Sequence[str]) -> list[str]:
    """Names of CPU rows, resolved, each once; ``ArgumentError`` for a target that bench does not run here."""
    from kvgen.backends.cpu import isa
    from kvgen.resolve import resolve_target
    from kvgen.targets import ALIASES, TARGETS

    here = [row.target for row in isa.ROWS.values() if isa.cpu_features().issuperset(row.required)]
    found = []
    for name in targets:
        if name not in (*TARGETS, *ALIASES):
            resolve_target(name)  # raises, with the nearest name
        if name != "cpu" and not name.startswith("cpu-"):
            raise ArgumentError(
                f"--target {name}: bench runs CPU kernels, here {', '.join(here)}; a GPU: --gpu-check"
            )
        resolved = resolve_target(name).name
        if resolved not in here:
            raise ArgumentError(f"--target {name}: this CPU cannot run it; it runs {', '.join(here)}")
        found.append(resolved)
    return list(dict.fromkeys(found))


def json_file(words: Sequence[str], as_json: bool) -> tuple[list[str], str | None]:
    """The specs among the arguments, and the file that ``--json FILE.json`` names. Specs end in .toml."""
    files = [word for word in words if word.endswith(".json")] if as_json else []
    if len(files) > 1:
        raise ArgumentError(f"--json {files[0]} {files[1]}: two files; give one")
    return [word for word in words if word not in files], files[0] if files else None


def chosen_cases(
    names: Sequence[str] | None,
    batch: Sequence[int] | None,
    context: int | None,
    queries: int | None,
    *,
    variants: bool = False,
) -> list[Case]:
    """Cases by name, or one of the caller's own for each batch; by default all, or those for variants."""
    from kvgen.bench import cases

    own = batch or context is not None or queries is not None
    if names and own:
        raise ArgumentError(
            f"--case {names[0]}: has its own shape; leave out --batch, --context and --queries"
        )
    default = cases.VARIANT_CASES if variants else ()
    return cases.free(batch or [], context, queries) if own else cases.choose(names or default)
