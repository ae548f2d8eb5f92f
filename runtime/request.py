"""Request: what an engine knows of one; Event: what it tells about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgen.runtime.sampling import Sampling
from kvgen.runtime.sequence import PagedSequence


@dataclass(eq=False)
class Request:
    """A prompt and what was generated after it."""

    id: int
    """Ids grow with the time of arrival."""
    tokens: list[int]
    """The prompt, then the generated tokens."""
    prompt: int
    """How many of ``tokens`` are the prompt. They are computed in pieces, the others one by one as they are
    generated (and again after a preemption, where that matters: see ``scheduler``)."""
    limit: int
    """``tokens`` never grows beyond this: the prompt's length plus max_new_tokens."""
    sampling: Sampling
    stop: frozenset[int]
    """Token ids that end the request."""
    sequence: PagedSequence
    """Keys and values of the first ``sequence.length`` tokens."""
    decoding: bool = False
    """Whether only the newest token's keys and values are missing; not so again after a preemption."""

    forks: int = 0
    """Forks of it so far: each draws numbers of its own."""

    def state(self) -> tuple[Any, ...]:
        """What ``restore`` takes."""
        return self.sequence.state(), len(self.tokens), self.decoding, self.forks

    def restore(self, state: tuple[Any, ...]) -> None:
        """Be again as when ``state`` was taken; may be repeated."""
        sequence, count, self.decoding, self.forks = state
        self.sequence.restore(sequence)
        del self.tokens[count:]

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are not computed yet; at least one, the newest."""
        return len(self.tokens) - self.sequence.length


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request in a step."""

    request: int
    """The id that ``add`` returned."""
    kind: str
    """``prefill``, ``token``, ``finished`` or ``preempted`` (its pages went to an older one; it waits)."""
    token: int = -1
    """``token``: the id. A stop token is reported too."""
    done: int = 0
    """``prefill``: tokens computed so far."""
    total: int = 0
    """``prefill``: tokens to compute; after a preemption the generated ones count as well."""
    reason: str = ""
    """``finished``: ``stop`` (a stop token), ``length`` (max_new_tokens) or ``error`` (see ``detail``)."""
    detail: str = ""
    """``finished`` with reason ``error``: what went wrong with this request."""
