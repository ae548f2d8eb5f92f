"""The registry: every mask, score term, sink and position scheme is one definition.

A definition feeds the checks of a spec file, the oracle, both backends, the tuner, ``kvgen list``, the tables
of ``docs/``, the bench rows and the export. To add one, register it; no template, pass or command changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvgen.ir import Param, RopeSpec
from kvgen.ir.meaning import OWN
from kvgen.ir.plan import Constant
from kvgen.passes.fields import ATTENTION, Field

if TYPE_CHECKING:
    from kvgen.variants.draw import Draw


@dataclass(frozen=True)
class Formula:
    """A definition for one value of its key."""

    text: str
    """Expression of ``docs/variants.md``: a predicate (mask), a score (score); empty for a sink."""
    constants: tuple[Constant, ...] = ()
    """Names in capitals that the text uses, with their values."""
    params: tuple[Param, ...] = ()
    """Tensors that it reads."""
    bounds: Mapping[str, str] = field(default_factory=dict)
    """Masks: ``lo``, ``hi``, ``full_lo``, ``full_hi`` for queries at positions ``pos_first`` .. ``pos_last``,
    where they cannot be derived from the text: the keys that some of them sees, and those that all see."""


@dataclass(frozen=True, eq=False)
class Definition:
    """A mask, a score term or a sink, switched on by a key of ``[attention]``."""

    name: str
    """The key."""
    kind: str
    """``mask``, ``score`` or ``sink``."""
    field: Field
    """The rule for its value. The default means off."""
    doc: str
    """One line for people."""
    source: str
    """Paper or project that it comes from."""
    formula: Callable[[Any, int], Formula]
    """(value of the key, q_heads) -> what it means."""
    example: Mapping[str, Any]
    """Keys of ``[attention]`` that show it, for tests, tables and bench rows."""
    words: str = "{name}"
    """What it does, for the header of a source; ``{value}`` is the key's value."""
    order: int = 50
    """Scores: earlier ones see the score first. Soft cap is 90, the last."""
    refuse: Callable[[Mapping[str, Any]], str | None] = lambda table: None
    """Given all of ``[attention]``: why it cannot stand beside other keys, or None."""
    sample: Callable[[Param, Draw], Any] | None = None
    """Hard but legal values of one of its parameters; None: any of its type will do."""


@dataclass(frozen=True, eq=False)
class Position:
    """A scheme of rotary frequencies: ``[attention.rope] kind``."""

    name: str
    fields: Mapping[str, Field]
    """Keys of its own beside ``theta`` and ``dim``."""
    doc: str
    source: str
    frequencies: Callable[[RopeSpec], tuple[list[float], float]]
    """Angles of one step of position, dim / 2 of them, and the factor on every cosine and sine."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Its own keys in an example."""


_DEFINITIONS: dict[str, Definition] = {}
_POSITIONS: dict[str, Position] = {}


def register(entry: Definition | Position, *, built_in: bool = False) -> None:
    """Make a definition known for the rest of the process. ``ValueError`` where its name is taken.

    Unless it is ``built_in`` (kvgen brings it), what it means becomes part of the identity of specs.
    """
    table: dict[str, Any] = _POSITIONS if isinstance(entry, Position) else _DEFINITIONS
    if entry.name in table:
        raise ValueError(f"{entry.name!r} is registered already")
    table[entry.name] = entry
    if not built_in:
        key, decided = _meaning(entry)
        OWN[key] = decided


def _meaning(entry: Definition | Position) -> tuple[str, Callable[[Any, int], Any]]:
    """The key of ``meaning.OWN``, and what gives all that a value of it decides."""
    if isinstance(entry, Position):
        return f"rope.{entry.name}", lambda rope, q_heads: entry.frequencies(rope)
    return entry.name, lambda value, q_heads: [entry.kind, entry.order, entry.formula(value, q_heads)]


@contextmanager
def registered(*entries: Definition | Position) -> Iterator[None]:
    """Definitions known inside a ``with`` block."""
    for entry in entries:
        register(entry)
    try:
        yield
    finally:
        for entry in entries:
            table: dict[str, Any] = _POSITIONS if isinstance(entry, Position) else _DEFINITIONS
            del table[entry.name]
            OWN.pop(_meaning(entry)[0], None)


def definitions(kind: str = "") -> tuple[Definition, ...]:
    """All definitions, or those of a kind, in the order in which they apply."""
    found = (d for d in _DEFINITIONS.values() if kind in ("", d.kind))
    return tuple(sorted(found, key=lambda d: d.order))


def positions() -> Mapping[str, Position]:
    """All position schemes by name."""
    return _POSITIONS


def attention_fields() -> dict[str, Field]:
    """The rules of all keys of [attention], registered ones included."""
    return ATTENTION | {d.name: d.field for d in _DEFINITIONS.values()}


def switched_on(value: Any) -> bool:
    """Whether the value of a definition's key switches it on. 0 does: a window of 0 shows the own key only.
    ``value in (None, False)`` would not, for 0 == False."""
    return value is not None and value is not False


def definition(name: str) -> Definition:
    """The definition called ``name``; ``KeyError`` where there is none."""
    return _DEFINITIONS[name]
