"""Engine: requests in, tokens out. One step = plan, forward, sample; ``generate`` is a loop over steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvgen.errors import ArgumentError, brief
from kvgen.runtime.arguments import need_integer, need_integers
from kvgen.runtime.layers import new_layers
from kvgen.runtime.model import Library, Model, need_model
from kvgen.runtime.ops import CacheOps
from kvgen.runtime.raw import distinct, most_rows
from kvgen.runtime.request import Event, Request
from kvgen.runtime.sampling import SEED_HINT, Greedy, Sampled, Sampling, choose, derived, seed_of, seeded
from kvgen.runtime.scheduler import Plan, Scheduler, Work
from kvgen.runtime.sequence import PagedSequence, PageStore
from kvgen.runtime.step import build_step
from kvgen.runtime.transaction import Saved, Transaction, restore

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
        seed: int = 0,
    ) -> None:
        """``max_batch`` requests run at once; a step computes up to ``chunk`` tokens of them together. (Where
        tokens wait to become codes it begins no piece of a prompt beyond that, and ends the last.)

        ``library``: one for all layers of the model, or a sequence with one for each, where layers differ
        (their page sizes may not). ``scales`` and ``means``: as for ``new_cache``, where the formats need
        them. ``raw_rows``: pages with unquantised tokens, at most; by default what
        ``max_batch`` requests need. ``seed``: of the numbers that ``Sampled`` requests draw which have no
        seed of their own. Raises ``ArgumentError``.
        """
        need_model(model)
        self.model = model
        self.seed = need_integer("seed", seed, 0, 2**64 - 1, SEED_HINT)
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
        self.requests: dict[int, Request] = {}
        """All that wait or run, by id."""
        self.next_id = 0
        self.untold: tuple[int, ...] = ()
        """Requests that a step preempted which did not commit: the next one tells."""
        self.saved: Saved | None = None
        """The state to go back to, while a call is under way."""
        self.generating = False
        """Whether all requests are those of a ``generate``, which drops them in the end."""

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        self.recover()
        return not self.requests

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
        self.recover()
        return self._add(prompt, max_new_tokens, sampling, stop)

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
        a page before it writes to it. Events tell only the tokens after the fork. A ``Sampled`` fork draws
        numbers of its own, which its parent's seed and the number of forks before it decide; with a
        ``sampling`` that has a seed, those of that seed.
        """
        self.recover()
        parent = self._find(request)
        with Transaction(self, parent):
            new = parent.limit - len(parent.tokens) if max_new_tokens is None else max_new_tokens
            how = parent.sampling if sampling is None else sampling
            self._check(parent.tokens, new, how)
            if isinstance(how, Sampled) and (sampling is None or how.seed is None):
                source = seed_of(parent.sampling, derived(self.seed, "request", parent.id))
                how = replace(how, seed=derived(source, "fork", parent.forks))
            stops = parent.stop if stop is None else _stops(stop)
            room = len(self.scheduler.running) < self.scheduler.max_batch
            child = Request(
                self.next_id,
                list(parent.tokens),
                parent.prompt,
                len(parent.tokens) + new,
                how,
                stops,
                parent.sequence.fork() if room else PagedSequence(self.store),
                room and parent.decoding,
            )
            parent.forks += 1
            return self._enter(child)

    def abort(self, request: int) -> bool:
        """Drop a request and free its pages; no event follows. False if it had finished already."""
        self.recover()
        with Transaction(self):
            if type(request) is int and 0 <= request < self.next_id and request not in self.requests:
                return False
            self._leave(self._find(request))
            return True

    def step(self) -> list[Event]:
        """Compute the next step and tell what happened.

        Whatever is raised, KeyboardInterrupt included: nothing has happened then, and the step can be tried
        again. (Requests that it preempted wait; the next step tells.) Should a request's logits be NaN, it
        finishes with reason ``error``; the others go on.
        """
        self.recover()
        return self._step()

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = Greedy(),  # noqa: B008 (frozen)
        stop: Iterable[int] = (),
    ) -> list[list[int]]:
        """The tokens generated after each prompt, a stop token included; options as for ``add``.

        Raises ``ArgumentError`` also where a request ends with reason ``error``; with ``step`` the others go
        on.
        """
        self.recover()
        if busy := len(self.requests):
            raise ArgumentError(f"{busy} requests are under way, whose events would be lost; use step()")
        try:
            prompts = iter(prompts)
        except TypeError:
            hint = "give prompts, each a sequence of token ids"
            raise ArgumentError(f"prompts = {brief(prompts)}: {hint}") from None
        stops = _stops(stop)
        found: dict[int, list[int]] = {}
        self.generating = True
        try:
            for prompt in prompts:
                found[self._add(prompt, max_new_tokens, sampling, stops)] = []
            while self.requests:
                for event in self._step():
                    if event.kind == "token":
                        found[event.request].append(event.token)
                    elif event.reason == "error":
                        raise ArgumentError(f"prompts[{list(found).index(event.request)}]: {event.detail}")
        finally:
            self.recover()
        return list(found.values())

    def _check(self, tokens: list[int], new: int, sampling: Sampling) -> None:
        self.scheduler.check(len(tokens), new)
        if not isinstance(sampling, Sampling):
            raise ArgumentError(f"sampling = {brief(sampling)}: give Greedy() or Sampled(...)")

    def recover(self) -> None:
        """Undo a call that was interrupted, and so was its undoing; drop what ``generate`` has left then."""
        self.undo()
        if self.generating:
            with Transaction(self):
                for request in list(self.requests.values()):
                    self._leave(request)
            self.generating = False

    def undo(self) -> None:
        """Go back to the begin of the call that is under way, if any."""
        if self.saved is not None:
            restore(self, self.saved)
            self.saved = None

    def _add(
        self, prompt: Iterable[int], max_new_tokens: int, sampling: Sampling, stop: Iterable[int]
    ) -> int:
        tokens = need_integers("prompt", prompt, "give token ids")
        if not tokens:
            raise ArgumentError("prompt = []: give at least one token")
        for at, token in enumerate(tokens):
            if not 0 <= token < self.model.vocab_size:
                raise ArgumentError(f"prompt[{at}] = {token}: token ids are 0 to {self.model.vocab_size - 1}")
        self._check(tokens, max_new_tokens, sampling)
        stops = _stops(stop)
        with Transaction(self):
            seed = derived(self.seed, "request", self.next_id)
            request = Request(
                self.next_id,
                tokens,
                len(tokens),
                len(tokens) + max_new_tokens,
                seeded(sampling, seed),
                stops,
                PagedSequence(self.store),
            )
            return self._enter(request)

    def _step(self) -> list[Event]:
        with Transaction(self) as saved:
            plan = Plan(preempted=saved.victims)
            self.scheduler.fill(plan)
            found = iter(self._forward(plan.work))
            for _, rows in plan.work:
                rows.sequence.settle()
            events = [Event(request, "preempted") for request in self.untold]
            self.untold = ()
            events += [Event(request.id, "preempted") for request in plan.preempted]
            for request, rows in plan.work:
                if not request.decoding:
                    done, total = rows.sequence.length, len(request.tokens)
                    events.append(Event(request.id, "prefill", done=done, total=total))
                if rows.sample:
                    events += self._extend(request, next(found))
            return events

    def _enter(self, request: Request) -> int:
        self.next_id += 1
        self.requests[request.id] = request
        self.scheduler.add(request)
        return request.id

    def _find(self, request: int) -> Request:
        if type(request) is not int or request not in self.requests:
            raise ArgumentError(f"request {brief(request)}: not waiting or running; it may have finished")
        return self.requests[request]

    def _leave(self, request: Request) -> None:
        del self.requests[request.id]
        self.scheduler.remove(request)

    def _forward(self, work: list[Work]) -> list[int | str]:
        """Run the model; the next token of each request that samples, or why there is none."""
        import torch

        if not work:
            return []
        saved = self.saved
        with torch.no_grad():
            step = build_step([rows for _, rows in work], self.layers[0].cache.device)
            logits = self.model.forward(step, self.layers)
        if self.saved is not saved:
            raise ArgumentError("model.forward: it called the engine that runs it; do that between steps")
        sampling = [request for request, rows in work if rows.sample]
        want = (len(sampling), self.model.vocab_size)
        if tuple(logits.shape) != want:
            raise ArgumentError(f"logits: shape {tuple(logits.shape)}, but the step asks for {want}")
        if not sampling:
            return []
        return choose(logits, [r.sampling for r in sampling], [len(r.tokens) for r in sampling])

    def _extend(self, request: Request, token: int | str) -> list[Event]:
        """Give a request its next token, which may be its last; or end it for a reason."""
        if isinstance(token, str):
            self._leave(request)
            return [Event(request.id, "finished", reason="error", detail=token)]
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
