"""kvgen quality: what storing K and V in fewer bits costs a real model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, read_spec
from kvgen.commands.progress import progress
from kvgen.commands.run import ModelName, PageSize, SpecFile, Threads
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.models.quality import Report


def run(
    model: ModelName = "smollm2",
    pages: Annotated[
        list[str] | None,
        typer.Option("--pages", metavar="KIND", help="bf16 or int8 (default); may be given several times."),
    ] = None,
    spec: SpecFile = None,
    page_size: PageSize = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="UTF-8 text; default: Python's help topics.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text to use.")] = 1536,
    window: Annotated[
        int | None, typer.Option("--window", min=2, help="Tokens that see each other; default 512.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model's next-token distributions on quantised pages with those on f32 pages.

    The text goes through both, every token given. KL is in nats: 0 means that nothing was lost, 0.001 that
    no reader would notice. Needs the extra "models", as kvgen run does.
    """
    given = read_spec(spec) if spec is not None else None
    if text is None:
        from kvgen.models.quality import default_text

        words = default_text()
    else:
        words = read_text(text)
    from kvgen.models.pages import check_pages, specs_for
    from kvgen.models.quality import measure
    from kvgen.models.session import choose_specs, load
    from kvgen.models.threads import using_threads

    for kind in pages or ():
        check_pages(kind)
    with using_threads(threads), progress(quiet=as_json) as advance:
        loaded = load(model, advance)
        if given is not None:
            # choose_specs refuses a kind of pages beside the spec.
            specs = [choose_specs(loaded, ",".join(pages) if pages else None, given, page_size)]
        else:
            specs = [choose_specs(loaded, kind, None, page_size) for kind in pages or ["int8"]]
        numbers = loaded.tokenizer(words, verbose=False)["input_ids"][:tokens]
        report = measure(
            loaded.model,
            numbers,
            specs_for(loaded.model.shape, "f32"),
            specs,
            name=loaded.name,
            window=window,
            advance=lambda name, done, total: advance(name, done, total, "tokens"),
        )
    if as_json:
        output.print_json(report.to_json())
    else:
        _print(report)


def read_text(path: Path) -> str:
    """A text file; ``ArgumentError`` where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"--text {path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _print(report: Report) -> None:
    columns = ("pages", "KL nats", "largest KL", "same top-1", "perplexity", "bytes/token")
    reference = ("f32", "-", "-", "-", f"{report.perplexity:.3f}", report.bytes_per_token)
    rows = [
        (
            row.pages,
            f"{row.kl_nats:.3g}",
            f"{row.kl_largest:.3g}",
            f"{row.top1_agreement:.2%}",
            f"{row.perplexity:.3f}",
            row.bytes_per_token,
        )
        for row in report.rows
    ]
    title = f"{report.model}: {report.tokens} tokens in windows of {report.window}"
    output.table(columns, [reference, *rows], title=title, right=columns[1:])
