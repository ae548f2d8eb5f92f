"""A session: a model, its tokenizer and the kernels for its pages, ready to answer prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvgen.errors import ArgumentError
from kvgen.models.adaptor import TransformersModel
from kvgen.models.catalog import PACKAGED, find_model
from kvgen.models.checkpoint import has_tokenizer, load_model, load_tokenizer, stop_tokens
from kvgen.models.pages import ModelSpecs, specs_for, specs_like, unknown_beforehand
from kvgen.models.shape import ModelShape, check_supported, read_config
from kvgen.models.text import TextStream
from kvgen.runtime.engine import Engine
from kvgen.runtime.request import Event
from kvgen.runtime.sampling import Sampling

if TYPE_CHECKING:
    from kvgen.ir import Spec
    from kvgen.runtime.ops import CacheOps

Advance = Callable[[str, int, int, str], None]
"""As ``kvgen.commands.progress``: stage, done, total, note."""


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer, which is None where the folder has none and none is needed."""

    name: str
    model: TransformersModel
    tokenizer: Any
    stop: tuple[int, ...]


@dataclass
class Answer:
    """What one request has given so far."""

    prompt: list[int]
    stream: TextStream | None
    """None without a tokenizer: tokens then stand for themselves."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    """Why it ended: ``stop``, ``length`` or ``error`` (``detail`` says which); empty until then."""
    detail: str = ""
    prefilled: int = 0
    """Tokens of the prompt that are done."""


@dataclass
class Timing:
    """Seconds until every request had its first token, and what came after."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens of all requests over the time they took; None where there were none."""
        return self.decode_tokens / self.decode_s if self.decode_tokens else None


def load(name: str, advance: Advance, *, need_tokenizer: bool = True) -> Loaded:
    """Find and load a model by name or folder; errors as ``find_model`` and ``load_model`` raise them."""
    folder = find_model(name, lambda done, total: advance("converting weights", done, total, name))
    check_supported(read_config(folder), folder)  # a folder that is none lacks more than a tokenizer
    tokenizer = load_tokenizer(folder) if need_tokenizer or has_tokenizer(folder) else None
    advance("loading the model", 0, 1, "")
    model = load_model(folder)
    shown = name if name in PACKAGED else folder.resolve().name
    return Loaded(shown, model, tokenizer, stop_tokens(model))


def choose_specs(
    loaded: Loaded, pages: str | None, spec: Spec | None, page_size: int | None, default: str = "f32"
) -> ModelSpecs:
    """The specs of a loaded model's pages; see ``specs_of``."""
    return specs_of(loaded.model.shape, pages, spec, page_size, default)


def specs_of(
    shape: ModelShape, pages: str | None, spec: Spec | None, page_size: int | None, default: str = "f32"
) -> ModelSpecs:
    """The specs of a model's pages: as ``spec``, which must match the model, or made for it."""
    if spec is None:
        made = specs_for(shape, pages or default, page_size=page_size)
        for wrong in unknown_beforehand(made[0]):
            hint = "kvgen quality measures it; give another kind"
            raise ArgumentError(f"--pages {pages}: {wrong.path}: {wrong.reason}; {hint}")
        return made
    for option, value in (("--pages", pages), ("--page-size", page_size)):
        if value is not None:
            raise ArgumentError(f"{option} {value}: --spec or --library says that already; leave it out")
    return specs_like(spec, shape)


def check_fits(loaded: Loaded, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse prompts (token ids) that the model has no place for, before pages are made for them.

    The engine would refuse them as well, but only after kernels and a pool of that size.
    """
    limit = loaded.model.max_positions
    for prompt in prompts:
        if not prompt:
            raise ArgumentError("PROMPT: makes no token; give at least one character")
        if len(prompt) + max_new_tokens > limit:
            left = limit - len(prompt)
            hint = f"give at most {left}" if left > 0 else "shorten the prompt"
            raise ArgumentError(
                f"--max-tokens {max_new_tokens} after a prompt of {len(prompt)}: "
                f"the model has positions for {limit} tokens; {hint}"
            )


class Session:
    """Requests that start together, on pages just large enough for them; a library for each layer."""

    def __init__(
        self,
        loaded: Loaded,
        libraries: Sequence[CacheOps],
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        samplings: Sequence[Sampling],
        stop: Sequence[int] | None = None,
    ) -> None:
        check_fits(loaded, prompts, max_new_tokens)
        page = libraries[0].spec.cache.page_size
        pages = sum(-(-(len(prompt) + max_new_tokens) // page) for prompt in prompts)
        self.engine = Engine(
            loaded.model, libraries, num_pages=pages, max_batch=len(prompts), chunk=max(512, len(prompts))
        )
        self.stop = frozenset(loaded.stop if stop is None else stop)
        self.timing = Timing()
        self.answers: list[Answer] = []
        self._by_request: dict[int, Answer] = {}
        for prompt, sampling in zip(prompts, samplings, strict=True):
            stream = TextStream(loaded.tokenizer) if loaded.tokenizer is not None else None
            answer = Answer(prompt, stream)
            request = self.engine.add(
                prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=self.stop
            )
            self.answers.append(answer)
            self._by_request[request] = answer

    def prefill(self) -> Iterator[int]:
        """Steps until every request has its first token; yields the prompt tokens done so far."""
        start = time.perf_counter()
        while not all(answer.tokens or answer.reason for answer in self.answers):
            self._step()
            yield sum(answer.prefilled for answer in self.answers)
        self.timing.prefill_s = time.perf_counter() - start

    def decode(self) -> Iterator[None]:
        """The remaining steps."""
        before = sum(len(answer.tokens) for answer in self.answers)
        start = time.perf_counter()
        while not self.engine.idle:
            self._step()
            self.timing.decode_s = time.perf_counter() - start
            self.timing.decode_tokens = sum(len(answer.tokens) for answer in self.answers) - before
            yield

    def need_answers(self) -> None:
        """``ArgumentError`` for the first answer that an error ended."""
        for number, answer in enumerate(self.answers, 1):
            if answer.reason == "error":
                raise ArgumentError(f"prompt {number}: {answer.detail}")

    def _step(self) -> None:
        for event in self.engine.step():
            self._take(self._by_request[event.request], event)

    def _take(self, answer: Answer, event: Event) -> None:
        if event.kind == "prefill":
            answer.prefilled = event.done
        elif event.kind == "token":
            answer.tokens.append(event.token)
            if answer.stream is None:
                answer.text += (" " if answer.text else "") + str(event.token)
            elif event.token not in self.stop:
                answer.text += answer.stream.push(event.token)
        elif event.kind == "finished":
            answer.reason, answer.detail = event.reason, event.detail
            if answer.stream is not None:
                answer.text += answer.stream.finish()
