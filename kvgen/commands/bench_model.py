"""kvgen bench --model: tokens per second of a real model, ours and transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.commands import output
from kvgen.commands.progress import progress
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.models.bench import Report


def run_model(
    model: str,
    *,
    pages: list[str] | None,
    batches: list[int],
    prompt: int,
    new_tokens: int,
    threads: int | None,
    rounds: int,
    as_json: bool,
) -> None:
    """Time and print each batch size."""
    from kvgen.models.bench import bench_model
    from kvgen.models.presets import check_pages
    from kvgen.models.quality import default_text
    from kvgen.models.session import choose_specs, load

    for kind in pages or ():
        check_pages(kind)
    with progress(quiet=as_json) as advance:
        loaded = load(model, advance, need_tokenizer=False)
        specs = [choose_specs(loaded, kind, None, None) for kind in dict.fromkeys(pages or ["f32"])]
        reports = []
        for batch in batches:
            stage = f"batch {batch}"
            advance(stage, 0, rounds, "rounds")
            prompts = _prompts(loaded.tokenizer, default_text(), batch, prompt, loaded.model.vocab_size)
            report = bench_model(
                loaded,
                specs,
                prompts,
                new_tokens=new_tokens,
                threads=threads,
                rounds=rounds,
                advance=lambda done, total, stage=stage: advance(stage, done, total, "rounds"),  # type: ignore[misc]
            )
            reports.append(report)
    if as_json:
        output.print_json([report.to_json() for report in reports])
        return
    for report in reports:
        _print(report)


def _prompts(tokenizer: object, text: str, batch: int, length: int, vocab: int) -> list[list[int]]:
    """Different pieces of one text; without a tokenizer its bytes stand for tokens."""
    if callable(tokenizer):
        tokens = list(tokenizer(text[: 16 * batch * length], verbose=False)["input_ids"])
    else:
        tokens = [byte % vocab for byte in text[: batch * length].encode()]
    if len(tokens) < batch * length:
        raise ArgumentError(
            f"--batch {batch} --context {length}: the text has {len(tokens)} tokens; give less of one"
        )
    return [tokens[i * length : (i + 1) * length] for i in range(batch)]


def _print(report: Report) -> None:
    columns = ("contender", "tokens/s", "ms a step", "prefill s", "times", "times (prefill)", "same tokens")
    rows = [
        (
            row.contender,
            f"{row.tokens_per_s:.1f}",
            f"{row.step_ms:.1f}",
            f"{row.prefill_s:.2f}",
            f"{row.ratio:.2f}",
            f"{row.prefill_ratio:.2f}",
            f"{row.same_tokens:.1%}",
        )
        for row in report.rows
    ]
    title = (
        f"{report.model}: {report.batch} x {report.prompt} + {report.new_tokens} tokens, "
        f"{report.threads} threads, {report.rounds} rounds"
    )
    output.table(columns, rows, title=title, right=columns[1:])
