"""Variants of attention: each mask, score term, sink and position scheme is one registered definition.

``docs/variants.md`` says how to write one. Importing this package registers those that kvgen brings.
"""

from kvgen.variants.masks import MASKS
from kvgen.variants.registry import (
    Definition,
    Formula,
    Position,
    attention_fields,
    definition,
    definitions,
    positions,
    register,
    registered,
    switched_on,
)
from kvgen.variants.rope import SCHEMES
from kvgen.variants.scores import SCORES

__all__ = [
    "Definition",
    "Formula",
    "Position",
    "attention_fields",
    "definition",
    "definitions",
    "positions",
    "register",
    "registered",
    "switched_on",
]

for _entry in (*MASKS, *SCORES, *SCHEMES):
    register(_entry, built_in=True)
