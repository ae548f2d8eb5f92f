"""Rules for the values that a call brings: their numbers. Kernels look, the runtime words the error."""

from __future__ import annotations

LENGTHS = 1
"""A length lies between 0 and the tokens that a row of the page table holds."""

STARTS = 2
"""Row starts begin at 0, never fall and end at the number of query rows."""

PAGES = 3
"""A page id that will be read names a page of the pool."""

SLOTS = 4
"""A slot is -1 or lies in the pool, and none comes twice in one append."""
