"""How a tile of tokens finds its pages: the texts that look ids up and point at K, V and their scales.

Four ways, decided by the page size, the tile and the width of a row:

``pages``  several whole pages make a tile. The pointers of one page's interior do not change from tile to
           tile; a tile is page ids times the page stride, added to them and reshaped [N, P, D] -> [T, D]
           before the load. This costs a third of the integer instructions of one address per token. On NVIDIA
           a page id times a 32-bit stride is one widening multiplication (``page_offset``), where the 64-bit
           product that LLVM makes of it takes four.
``page``   the tile lies inside one page: one id, and a scalar step to the tile's first token. Address
           terms of tok separate there, because the tile starts on a multiple of itself and everything is
           a power of two: at(first + t) = at(first) + at(t), split axes included.
``runs``   the same for rows so wide that a pointer for each 16 bytes of a tile would take all registers: the
           tile is cut into runs of 16 tokens, which share the pointers of one run's interior.
``flat``   the page size is not a power of two (or is 1): every token looks its own page up.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir import Target
from kvgen.passes.address import Address
from kvgen.passes.integers import evaluate
from kvgen.passes.plan_triton_parts import DPart

RUN = 16
"""Tokens of a run."""

WIDE = 512
"""Elements of a row from which runs pay."""


@dataclass(frozen=True)
class Lookup:
    """How page ids are found for the tile that starts at token ``tile``."""

    kind: str
    """``pages``, ``page``, ``runs`` or ``flat``."""
    ids: str
    """Name of the ids in the source."""
    count: int
    """Pages a tile spans (0 for ``flat``)."""
    page_size: int
    tile: int
    page: str = "PAGE"
    """Text of the page size where the first token of a tile, a plain number, meets ``%``."""

    def index(self, tile: str) -> str:
        """Columns of the page table for the tile starting at ``tile``."""
        if self.kind == "flat":
            return f"({tile} + tok_T)" if self.page_size == 1 else f"({tile} + tok_T) // PAGE"
        first = f"({tile}) // PAGE" if " " in tile else f"{tile} // PAGE"
        return f"{first} + page_N" if self.kind == "pages" else first

    def load(self, tile: str, guard: str = "") -> str:
        """The ids of a tile; ``guard`` is a condition on ``column`` for a read that may pass the end."""
        if not guard:
            return f"tl.load(table_row + {self.index(tile)})"
        return f"tl.load(table_row + column, mask={guard}, other=0)"

    @property
    def indices(self) -> tuple[str, ...]:
        """Definitions of the index vectors that pointers use."""
        tok = "tok_T = tl.arange(0, TILE)"
        if self.kind == "pages":
            return (tok, "page_N = tl.arange(0, TILE // PAGE)", "tok_P = tl.arange(0, PAGE)")
        if self.kind == "runs":
            return (tok, f"run_N = tl.arange(0, TILE // {RUN}) * {RUN}", f"tok_P = tl.arange(0, {RUN})")
        return (tok,)

    @property
    def step(self) -> str:
        """Token of its page on which a tile, or each of its runs, starts; empty where that is the first."""
        first = "" if self.page_size == self.tile else f"tile % {self.page}"
        if self.kind == "runs":
            return f"({first} + run_N)" if first else "run_N"
        return f"({first})" if first else ""

    @property
    def grouped(self) -> bool:
        """Whether pointers are those of a group of tokens, moved to several places."""
        return self.kind in ("pages", "runs")


@dataclass(frozen=True)
class View:
    """The texts that point at one plane for one KV head."""

    name: str
    """Plane: ``k``, ``v``, ``k_scale`` or ``v_scale``."""
    address: Address
    lookup: Lookup
    parts: tuple[DPart, ...]
    """d-parts of a data plane; empty for scales."""
    word: int = 1
    """Stored elements of one loaded element: 2 where bytes are loaded as pairs."""
    multiple: int = 0
    """What the page stride is a multiple of, in elements, where ids are multiplied by ``page_offset``; 0
    where they are not."""

    def d(self, part: DPart) -> str:
        """Name of the element (or word) indices of a part."""
        return f"{self.name}_{'w' if self.word > 1 else 'd'}{part.tag}_D"

    @property
    def widens(self) -> bool:
        """Whether page ids become offsets through ``page_offset``."""
        return self.multiple > 0 and self.lookup.kind in ("pages", "flat")

    def setup(self) -> tuple[str, ...]:
        """Loop-invariant pointers."""
        base = self._sum(f"{self.name}_ptr", self.address.triton(head="head"))
        if not self.parts:
            tok = {"pages": "tok_P", "runs": "tok_P", "page": "tok_T"}.get(self.lookup.kind)
            name = self._fixed("")
            return (f"{name} = {self._sum(base, self._tok(tok) if tok else '0')}",)
        return tuple(f"{self._fixed(p.tag)} = {self._sum(base, self._interior(p))}" for p in self.parts)

    def locate(self) -> str:
        """Where the tile's pages (or rows) start, in elements, 64-bit."""
        page = self.address.triton(page=self.lookup.ids)
        if self.widens:
            (term,) = self.address.of("page")
            page = f"page_offset({self.lookup.ids}, {term.stride_name}, {self.multiple})"
        kind = self.lookup.kind
        tok = {"pages": "", "flat": self._slot()}.get(kind, self.lookup.step)
        return f"{self._at} = {self._sum(page, self.address.triton(tok=tok) if tok else '0')}"

    def scale(self, element: int) -> str:
        """Pointers [TILE] to the scales of a tile, of the block of d that holds ``element``."""
        fixed = self._fixed("") + block_step(self.address, element)
        if not self.lookup.grouped:
            return f"{fixed} + {self._at}"
        fixed = f"({fixed})" if " " in fixed else fixed
        return f"tl.reshape({fixed}[None, :] + {self._at}[:, None], [TILE])"

    def pointer(self, tag: str) -> str:
        """Pointers [TILE, width] of a tile of data."""
        fixed, kind = self._fixed(tag), self.lookup.kind
        width = next(p.width for p in self.parts if p.tag == tag) // self.word
        if self.lookup.grouped:
            return f"tl.reshape({fixed}[None, :, :] + {self._at}[:, None, None], [TILE, {width}])"
        return f"{fixed} + {self._at}" if kind == "page" else f"{fixed}[None, :] + {self._at}[:, None]"

    @property
    def _at(self) -> str:
        return f"{self.name}_at" + {"page": "", "flat": "_T"}.get(self.lookup.kind, "_N")

    def _fixed(self, tag: str) -> str:
        """Name of the loop-invariant pointers, with their shape."""
        kind = self.lookup.kind
        shape = {"page": "T", "flat": ""}.get(kind, "P") + ("D" if self.parts else "")
        place = {"pages": "page", "page": "tile", "runs": "run", "flat": "head"}[kind]
        return f"{self.name}_{place}{tag}_{shape}".rstrip("_")

    def _interior(self, part: DPart) -> str:
        d = self.d(part)
        if self.lookup.kind == "flat":
            return self.address.triton(d=d)
        tok = "tok_P[:, None]" if self.lookup.grouped else "tok_T[:, None]"
        if self.address.of("tok"):
            return self.address.triton(tok=tok, d=f"{d}[None, :]")
        return self._sum(self._tok(tok), self.address.triton(d=f"{d}[None, :]"))

    def _tok(self, tok: str) -> str:
        """The tokens' places: of their shape also where all tokens of a page share one."""
        return self.address.triton(tok=tok) if self.address.of("tok") else f"{tok} * 0"

    def _slot(self) -> str:
        return "slot_T" if self.lookup.page_size > 1 else ""

    @staticmethod
    def _sum(*terms: str) -> str:
        return " + ".join(term for term in terms if term != "0") or "0"


def block_step(scales: Address, element: int) -> str:
    """Text from a row's first scale to that of the block of d with ``element``; empty for the first."""
    text = ""
    for term in scales.of("d"):
        if step := int(evaluate(term.index, {"d": element})):
            text += f" + {step}" + (f" * {term.stride_name}" if term.stride != 1 else "")
    return text


def lookup_for(page_size: int, tile: int, target: Target, width: int) -> Lookup:
    """The way that fits; ``tile`` is a power of two, ``width`` the elements of a row of K."""
    if page_size == 1 or page_size & (page_size - 1):
        return Lookup("flat", "ids_T", 0, page_size, tile)
    if page_size >= tile:
        # Interpreted, a loop counts in Python's integers, which know no % by a constexpr.
        page = str(page_size) if target.interpreted else "PAGE"
        kind = "runs" if width >= WIDE and tile > RUN else "page"
        return Lookup(kind, "page_id", 1, page_size, tile, page)
    return Lookup("pages", "ids_N", tile // page_size, page_size, tile)
