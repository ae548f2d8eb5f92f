"""Engine: requests in, tokens out. One step = plan, forward, sample; ``generate`` is a loop over steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvgen.errors import ArgumentError, brief
from kvgen.runtime.arguments import need_integers
from kvgen.runtime.layers import new_layers
from kvgen.runtime.model import Library, Model
from kvgen.runtime.ops import CacheOps
from kvgen.runtime.raw import distinct, most_rows
from kvgen.runtime.request import Event, Request
from kvgen.runtime.sampling import Greedy, Sampling, choose
from kvgen.runtime.scheduler import Plan, Scheduler, Work
from kvgen.runtime.sequence import PagedSequence, PageStore
from kvgen.runtime.step import build_step

__all__ = ["Engine", "Event", "Library", "Model"]


class Engine:
    """Continuous batching of requests over one model and one paged cache. For one thread at a time."""

    def __init__(
        self,
        model: Model,
        library: Library | Sequence[Library],
        *,
        num_pages: int,
        max_batch: int = 64,
        chunk: int = 512,
        scales: Any = None,
        means: Any = None,
        raw_rows: int | None = None,
    ) -> None:
        """``max_batch`` requests run at once; a step computes up to ``chunk`` tokens of them together.

        ``library``: one for all layers of the model, or a sequence with one for each, where layers differ
        (their page sizes may not). ``scales`` and ``means``: as for ``new_cache``, where the formats need
        them. ``raw_rows``: pages with unquantised tokens, at most; by default what
        ``max_batch`` requests need. Raises ``ArgumentError``.
        """
        self.model = model
        options = {"scales": scales, "means": means, "raw_rows": raw_rows}
        if raw_rows is None:
            options["raw_rows"] = _rows_of(library, num_pages, max_batch)
        self.layers = new_layers(library, num_pages, layers=model.num_layers, **options)
        if not all(layer.library.spec.attention.causal for layer in self.layers):
            raise ArgumentError("attention.causal = False: an engine computes prompts in chunks; use causal")
        self.store = PageStore(self.layers)
        self.scheduler = Scheduler(
            self.store, max_batch=max_batch, chunk=chunk, max_positions=model.max_positions
        )
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._requests

    def add(
        self,
        prompt: Iterable[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = Greedy(),  # noqa: B008 (frozen)
        stop: Iterable[int] = (),
    ) -> int:
        """Queue a prompt; returns the request's id. Raises ``ArgumentError`` for what can never finish.

        It ends after ``max_new_tokens`` tokens or with a token of ``stop``, whichever comes first.
        """
        tokens = need_integers("prompt", prompt, "give token ids")
        if not tokens:
            raise ArgumentError("prompt = []: give at least one token")
        for at, token in enumerate(tokens):
            if not 0 <= token < self.model.vocab_size:
                raise ArgumentError(f"prompt[{at}] = {token}: token ids are 0 to {self.model.vocab_size - 1}")
        self._check(tokens, max_new_tokens, sampling)
        return self._enter(tokens, max_new_tokens, sampling, _stops(stop), PagedSequence(self.store))

    def fork(
        self,
        request: int,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Iterable[int] | None = None,
    ) -> int:
        """A second request that goes on from the first one's tokens; by default as the first would.

        It shares the pages computed so far, if it can run at once (``max_batch``); each of the two copies
        a page before it writes to it. Events tell only the tokens after the fork.
        """
        parent = self._find(request)
        new = parent.limit - len(parent.tokens) if max_new_tokens is None else max_new_tokens
        how = parent.sampling if sampling is None else sampling
        self._check(parent.tokens, new, how)
        stops = parent.stop if stop is None else _stops(stop)
        room = len(self.scheduler.running) < self.scheduler.max_batch
        sequence = parent.sequence.fork() if room else PagedSequence(self.store)
        child = self._enter(list(parent.tokens), new, how, stops, sequence)
        self._requests[child].decoding = room and parent.decoding
        return child

    def abort(self, request: int) -> bool:
        """Drop a request and free its pages; no event follows. False if it had finished already."""
        if isinstance(request, int) and 0 <= request < self._next_id and request not in self._requests:
            return False
        self._leave(self._find(request))
        return True

    def step(self) -> list[Event]:
        """Compute the next step and tell what happened.

        If the model raises, the step can be tried again; only its ``preempted`` events are not told.
        """
        plan = Plan()
        try:
            self.scheduler.fill(plan)
            tokens = iter(self._forward(plan.work))
        except BaseException:
            for _, rows in plan.work:
                rows.sequence.truncate(rows.sequence.length - len(rows.tokens))
            raise
        for _, rows in plan.work:
            rows.sequence.settle()
        events = [Event(request.id, "preempted") for request in plan.preempted]
        for request, rows in plan.work:
            if not request.decoding:
                done, total = rows.sequence.length, len(request.tokens)
                events.append(Event(request.id, "prefill", done=done, total=total))
            if rows.sample:
                events += self._extend(request, next(tokens))
        return events

    def generate(self, prompts: Iterable[Sequence[int]], **options: Any) -> list[list[int]]:
        """The tokens generated after each prompt, a stop token included; ``options`` as for ``add``."""
        if busy := len(self._requests):
            raise ArgumentError(f"{busy} requests are under way, whose events would be lost; use step()")
        try:
            prompts = iter(prompts)
        except TypeError:
            hint = "give prompts, each a sequence of token ids"
            raise ArgumentError(f"prompts = {brief(prompts)}: {hint}") from None
        found: dict[int, list[int]] = {}
        try:
            for prompt in prompts:
                found[self.add(prompt, **options)] = []
            while not self.idle:
                for event in self.step():
                    if event.kind == "token":
                        found[event.request].append(event.token)
        finally:
            for request in found:
                self.abort(request)
        return list(found.values())

    def _check(self, tokens: list[int], new: int, sampling: Sampling) -> None:
        self.scheduler.check(len(tokens), new)
        if not isinstance(sampling, Sampling):
            raise ArgumentError(f"sampling = {brief(sampling)}: give Greedy() or Sampled(...)")

    def _enter(
        self, tokens: list[int], new: int, sampling: Sampling, stop: frozenset[int], sequence: PagedSequence
    ) -> int:
        request = Request(self._next_id, tokens, len(tokens) + new, sampling, stop, sequence)
        self._next_id += 1
        self._requests[request.id] = request
        self.scheduler.add(request)
        return request.id

    def _find(self, request: int) -> Request:
        if not isinstance(request, int) or request not in self._requests:
            raise ArgumentError(f"request {brief(request)}: not waiting or running; it may have finished")
        return self._requests[request]

    def _leave(self, request: Request) -> None:
        del self._requests[request.id]
        self.scheduler.remove(request)

    def _forward(self, work: list[Work]) -> list[int]:
        """Run the model; the next token of each request that samples."""
        import torch

        if not work:
            return []
        with torch.no_grad():
            step = build_step([rows for _, rows in work], self.layers[0].cache.device)
            logits = self.model.forward(step, self.layers)
        sampling = [request for request, rows in work if rows.sample]
        want = (len(sampling), self.model.vocab_size)
        if tuple(logits.shape) != want:
            raise ArgumentError(f"logits: shape {tuple(logits.shape)}, but the step asks for {want}")
        if not sampling:
            return []
        return choose(logits, [r.sampling for r in sampling], [len(r.tokens) for r in sampling])

    def _extend(self, request: Request, token: int) -> list[Event]:
        """Give a request its next token, which may be its last."""
        request.tokens.append(token)
        request.decoding = True
        events = [Event(request.id, "token", token=token)]
        if token in request.stop or len(request.tokens) == request.limit:
            self._leave(request)
            events.append(Event(request.id, "finished", reason="stop" if token in request.stop else "length"))
        return events


def _rows_of(library: Any, num_pages: Any, max_batch: Any) -> int | None:
    """Raw rows for ``max_batch`` requests that grow token by token; None where no layer leaves tokens raw."""
    each = library if isinstance(library, Sequence) else [library]
    specs = distinct(own.spec for own in each if isinstance(own, CacheOps))
    if not specs or not all(type(n) is int and n > 0 for n in (num_pages, max_batch)):
        return None
    at_rest, during = most_rows(specs)
    return int(min(num_pages, max(max_batch * (at_rest + 1), during)))


def _stops(stop: Iterable[int]) -> frozenset[int]:
    return frozenset(need_integers("stop", stop, "give the token ids that end the request"))
