"""kvgen quality: what storing K and V in fewer bits costs a real model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, read_spec
from kvgen.commands.progress import progress
from kvgen.commands.run import ModelName, PageSize, Threads
from kvgen.errors import ArgumentError
from kvgen.names import FORMAT, told

if TYPE_CHECKING:
    from kvgen.ir import Spec
    from kvgen.models.quality import Report

USUAL = ("bf16", "int8", "fp8", "int4", "int2")
"""What is measured where nothing is named."""

MOST_BYTES = 64 << 20
"""Of a text: what goes on for ever, a device for example, is not read to its end."""

Q_DTYPES = ("f32", "bf16", "f16")


def run(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC...", help="TOML specs, or presets; default: bf16 int8 fp8 int4 int2."),
    ] = None,
    model: ModelName = "smollm2",
    page_size: PageSize = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="UTF-8 text; default: Python's help topics.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text to use.")] = 1536,
    context: Annotated[
        int | None, typer.Option("--context", min=2, help="Tokens that see each other; default 512.")
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option("--chunk", min=1, help="Tokens that are appended together; default: a whole context."),
    ] = None,
    q_dtype: Annotated[
        str, typer.Option("--q-dtype", metavar="TYPE", help="Of queries and raw tokens: f32, bf16 or f16.")
    ] = "f32",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw KL against bits: .png, .svg or .pdf."),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model's next-token distributions on quantised pages with those on f32 pages.

    The text goes through all of them, every token given. KL is in nats: 0 means that nothing was lost, 0.001
    that no reader would notice. A spec's [cache], qk, pv and rope.stored are used; the rest of its attention
    is the model's. Presets: see docs/quality.md. Needs the extra "models", as kvgen run does.

    With --chunk, a query finds the last tokens raw where a spec keeps them, as in decoding; otherwise a whole
    context is stored before any query reads it.
    """
    if q_dtype not in Q_DTYPES:
        hint = told(q_dtype, Q_DTYPES, FORMAT)
        raise ArgumentError(f"--q-dtype {q_dtype}: no such type; {hint}There are {', '.join(Q_DTYPES)}")
    wanted = [_preset_or_spec(kind, page_size) for kind in kinds or USUAL]
    from kvgen.models.quality import default_text, measure
    from kvgen.models.quality_plot import draw, need_plot

    if plot is not None:
        need_plot(str(plot))
    words = default_text() if text is None else read_text(text)
    from kvgen.models.pages import spec_for, specs_for, specs_stored_like
    from kvgen.models.rotation import model_rope
    from kvgen.models.session import load
    from kvgen.models.threads import using_threads

    with using_threads(threads), progress(quiet=as_json) as advance:
        loaded = load(model, advance)
        shape, rope = loaded.model.shape, model_rope(loaded.model.module.config)
        first = shape.kinds[0]
        specs = [
            specs_stored_like(
                spec_for(first, kind, page_size=page_size) if isinstance(kind, str) else kind,
                shape,
                rope,
                q_dtype,
            )
            for kind in wanted
        ]
        numbers = loaded.tokenizer(words, verbose=False)["input_ids"][:tokens]
        report = measure(
            loaded.model,
            numbers,
            specs_for(shape, "f32"),
            specs,
            name=loaded.name,
            context=context,
            chunk=chunk,
            advance=lambda name, done, total: advance(name, done, total, "tokens"),
        )
    if plot is not None:
        draw(report, str(plot))
    if as_json:
        output.print_json(report.to_json())
    else:
        _print(report)


def _preset_or_spec(kind: str, page_size: int | None) -> str | Spec:
    """A preset's name as it is, and the spec in a file; ``SpecError`` where it is neither."""
    from kvgen.models.presets import PAGES, check_pages

    if kind in PAGES:
        return kind
    if "." not in kind and "/" not in kind:
        check_pages(kind, "SPEC")
    if page_size is not None:
        raise ArgumentError(f"--page-size {page_size}: {kind} says that already; leave it out")
    return read_spec(kind)


def read_text(path: Path) -> str:
    """A text file; ``ArgumentError`` where it is not UTF-8 or has more than ``MOST_BYTES``."""
    with path.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ArgumentError(f"--text {path}: more than {MOST_BYTES:,} bytes; give a part of it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"--text {path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _print(report: Report) -> None:
    at = f"bits at {report.context}"
    columns = ("pages", "KL nats", "largest KL", "same top-1", "perplexity", "bits", at)
    reference = ("f32", "-", "-", "-", f"{report.perplexity:.3f}", "32", "32")
    rows = [
        (
            row.pages,
            f"{row.kl_nats:.3g}",
            f"{row.kl_largest:.3g}",
            f"{row.top1_agreement:.2%}",
            f"{row.perplexity:.3f}",
            f"{row.bits:.4g}",
            f"{row.bits_at_context:.4g}",
        )
        for row in report.rows
    ]
    steps = "" if report.chunk == report.context else f", {report.chunk} at a time"
    title = f"{report.model}: {report.tokens} tokens in contexts of {report.context}{steps}"
    output.table(columns, [reference, *rows], title=title, right=columns[1:])
