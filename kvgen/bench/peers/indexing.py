"""torch's indexing: rows appended with index_copy_, pages copied and gathered by their ids."""

from __future__ import annotations

from kvgen.bench.contender import Scene, Tensor, torch_type
from kvgen.bench.expect import MOVED
from kvgen.bench.ours import append_slots

PAGE = 16


class Append:
    """``index_copy_`` into K and V, one row of all heads for each token."""

    def __init__(self, scene: Scene, form: str, name: str) -> None:
        self.format, self.name, self.tolerance = form, name, MOVED[form]
        dtype, count = torch_type(form), scene.case.count
        self._rows = [scene.k.to(dtype), scene.v.to(dtype)]
        self.nbytes = sum(rows.nbytes for rows in self._rows)
        self._slots = append_slots(scene, self.nbytes, PAGE)
        self.sets = len(self._slots)
        places = -(-self.sets // PAGE) * PAGE * count
        self._planes = [scene.empty(places, *rows.shape[1:], dtype=dtype) for rows in self._rows]

    def call(self, turn: int) -> None:
        """One append."""
        slots = self._slots[turn % self.sets]
        for plane, rows in zip(self._planes, self._rows, strict=True):
            plane.index_copy_(0, slots, rows)

    def results(self, turn: int) -> dict[str, Tensor]:
        """The rows in their slots."""
        slots = self._slots[turn % self.sets]
        return {side: plane[slots] for side, plane in zip("kv", self._planes, strict=True)}


class Pages:
    """Pages of all heads, by index."""

    def __init__(self, scene: Scene, form: str, name: str) -> None:
        import torch

        self.scene, self.format, self.name, self.tolerance = scene, form, name, MOVED[form]
        self._copies = scene.case.op == "copy"
        lens = scene.case.kv_lens or (scene.tokens,)
        self._keys, width = lens[0], -(-lens[0] // PAGE)
        dtype, shape, each = torch_type(form), scene.shape, len(lens) * width
        self._used = torch.cat([torch.arange(n) + i * width * PAGE for i, n in enumerate(lens)])
        row = shape.kv_heads * (shape.head_dim + shape.v_head_dim) * dtype.itemsize
        self.nbytes = 2 * scene.tokens * row  # read and written
        self.sets = scene.sets(self.nbytes)
        span = 2 * each if self._copies else each
        order = torch.randperm(self.sets * span, generator=scene.random).reshape(self.sets, span)
        self._from, self._to = order[:, :each].contiguous(), order[:, each:].contiguous()
        self._pools, self._made = [], []
        for rows in (scene.k, scene.v):
            pool = scene.empty(self.sets * span, PAGE, *rows.shape[1:], dtype=dtype)
            padded = rows.new_zeros(each * PAGE, *rows.shape[1:])
            padded[self._used] = rows
            for ids in self._from:
                pool[ids] = padded.reshape(each, PAGE, *rows.shape[1:]).to(dtype)
            self._pools.append(pool)
            self._made.append(torch.empty(each, *pool.shape[1:], dtype=dtype))

    def call(self, turn: int) -> None:
        """One copy, or one gather."""
        import torch

        at = turn % self.sets
        for pool, made in zip(self._pools, self._made, strict=True):
            if self._copies:
                pool.index_copy_(0, self._to[at], pool.index_select(0, self._from[at]))
            else:
                torch.index_select(pool, 0, self._from[at], out=made)

    def results(self, turn: int) -> dict[str, Tensor]:
        """The rows that were moved."""
        at = turn % self.sets
        moved = [pool[self._to[at]] for pool in self._pools] if self._copies else self._made
        return {side: made.flatten(0, 1)[self._used] for side, made in zip("kv", moved, strict=True)}
