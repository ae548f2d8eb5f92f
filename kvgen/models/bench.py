"""bench of a real model: tokens per second of kvgen's engine and of transformers' generate, in one process.

All contenders run the same weights, prompts, token counts and threads, and take turns, so that drift of the
machine hits all of them; the figures are medians. transformers gets its default DynamicCache, prompts of
one length (so no padding) and inference mode, as the engine has.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvgen.errors import ArgumentError
from kvgen.models.adaptor import NAME
from kvgen.models.kernels import built
from kvgen.models.session import Session
from kvgen.models.threads import using_threads
from kvgen.runtime.sampling import Greedy

if TYPE_CHECKING:
    from kvgen.models.pages import ModelSpecs
    from kvgen.models.session import Loaded

PEERS = {"transformers eager": "eager", "transformers SDPA": "sdpa"}
"""Contender -> transformers' attention implementation."""


@dataclass(frozen=True)
class Turn:
    """One generation of one contender."""

    prefill_s: float
    """Until every request has its first token."""
    step_s: float
    """Each later token of all requests, on average."""
    tokens: list[list[int]]


@dataclass(frozen=True)
class Row:
    """One contender."""

    contender: str
    tokens_per_s: float
    """Decoded tokens of all requests a second, from the median step."""
    step_ms: float
    """Median time of a decode step."""
    prefill_s: float
    """Median time to every request's first token."""
    ratio: float
    """Its time of a decode step over that of the first row: above 1, the first row is faster."""
    prefill_ratio: float
    """The same of prefill."""
    same_tokens: float
    """Fraction of tokens equal to those of transformers eager, up to each request's first difference."""


@dataclass(frozen=True)
class Report:
    """One batch size."""

    model: str
    batch: int
    prompt: int
    new_tokens: int
    threads: int
    rounds: int
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def bench_model(
    loaded: Loaded,
    specs: Sequence[ModelSpecs],
    prompts: Sequence[list[int]],
    *,
    new_tokens: int = 32,
    threads: int | None = None,
    rounds: int = 3,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Time greedy generation of ``new_tokens`` tokens after ``prompts``, which are of one length."""
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ArgumentError("prompts: of several lengths; transformers would need padding")
    if new_tokens < 2:
        raise ArgumentError(f"new_tokens = {new_tokens}: the first belongs to prefill; give at least 2")
    contenders: dict[str, Callable[[], Turn]] = {}
    for each in specs:
        own = built(each)
        contenders[f"kvgen {each[0].name}"] = lambda own=own: _ours(loaded, own, prompts, new_tokens)  # type: ignore[misc]
    for name, implementation in PEERS.items():
        contenders[name] = lambda kind=implementation: _theirs(loaded, kind, prompts, new_tokens)  # type: ignore[misc]
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    with using_threads(threads) as count:
        for run in contenders.values():  # warm-up: kernels are loaded, memory is touched
            run()
        for done in range(rounds):
            advance(done, rounds)
            for name, run in contenders.items():
                turns[name].append(run())
    eager = turns["transformers eager"][0].tokens
    steps = {name: statistics.median(turn.step_s for turn in of) for name, of in turns.items()}
    starts = {name: statistics.median(turn.prefill_s for turn in of) for name, of in turns.items()}
    first = next(iter(contenders))
    rows = tuple(
        Row(
            contender=name,
            tokens_per_s=len(prompts) / steps[name],
            step_ms=steps[name] * 1e3,
            prefill_s=starts[name],
            ratio=steps[name] / steps[first],
            prefill_ratio=starts[name] / starts[first],
            same_tokens=same_fraction(turns[name][0].tokens, eager),
        )
        for name in contenders
    )
    return Report(loaded.name, len(prompts), len(prompts[0]), new_tokens, count, rounds, rows)


def same_fraction(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Fraction of tokens before each pair's first difference; what follows one is another text."""
    same = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        differs = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine))
        same, total = same + differs, total + len(mine)
    return same / total


def _ours(loaded: Loaded, libraries: Sequence[Any], prompts: Sequence[list[int]], new_tokens: int) -> Turn:
    session = Session(
        loaded,
        libraries,
        prompts,
        max_new_tokens=new_tokens,
        samplings=[Greedy()] * len(prompts),
        stop=(),
    )
    for _ in session.prefill():
        pass
    for _ in session.decode():
        pass
    session.need_answers()
    timing = session.timing
    # Where prefill takes several steps, the first requests have decoded some tokens by its end.
    step_s = timing.decode_s / timing.decode_tokens * len(prompts)
    return Turn(timing.prefill_s, step_s, [answer.tokens for answer in session.answers])


def _theirs(loaded: Loaded, kind: str, prompts: Sequence[list[int]], new_tokens: int) -> Turn:
    import torch

    stamps: list[float] = []

    def clock(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    ids_BT = torch.tensor(prompts)
    with other_attention(loaded.model.module, kind) as module, torch.inference_mode():
        start = time.perf_counter()
        found = module.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=[clock],
        )
    made = found[:, ids_BT.shape[1] :].tolist()
    return Turn(stamps[0] - start, (stamps[-1] - stamps[0]) / (len(stamps) - 1), made)


@contextlib.contextmanager
def other_attention(module: Any, kind: str) -> Iterator[Any]:
    """The module with another of transformers' attention implementations, and no token that ends a text."""
    from transformers import GenerationConfig

    settings = module.generation_config
    module.set_attn_implementation(kind)
    module.generation_config = GenerationConfig(pad_token_id=0)
    try:
        yield module
    finally:
        module.generation_config = settings
        module.set_attn_implementation(NAME)
