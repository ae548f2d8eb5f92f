"""llama.cpp's attention: ggml's flash_attn_ext over contiguous K and V, from llama-cpp-python's libraries.

Only C functions that have kept their form for long are called; no struct of ggml's is read.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvgen.bench.contender import Scene, Tensor, torch_type
from kvgen.bench.expect import ROUNDING
from kvgen.errors import ToolchainError, UnsupportedError
from kvgen.models.extras import installed

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
"""ggml's numbers of its types."""

BLOCK_BYTES = {"q4_0": 18, "q8_0": 34}
"""Bytes of a block of 32 elements."""

TOLERANCE = {**ROUNDING, "f16": 0.05, "q8_0": 0.05, "q4_0": 0.4}
"""As ``ROUNDING``; its block formats round K, V and the query, and it adds up f16 values of V in f16."""

OK = 0


class _Params(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


P, I64, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    # name: (library, result, arguments)
    "ggml_init": ("base", P, (_Params,)),
    "ggml_free": ("base", None, (P,)),
    "ggml_tensor_overhead": ("base", ctypes.c_size_t, ()),
    "ggml_graph_overhead": ("base", ctypes.c_size_t, ()),
    "ggml_new_tensor_4d": ("base", P, (P, ctypes.c_int, I64, I64, I64, I64)),
    "ggml_flash_attn_ext": ("base", P, (P, P, P, P, P, F32, F32, F32)),
    "ggml_new_graph": ("base", P, (P,)),
    "ggml_build_forward_expand": ("base", None, (P, P)),
    "ggml_nbytes": ("base", ctypes.c_size_t, (P,)),
    "ggml_quantize_chunk": ("base", ctypes.c_size_t, (ctypes.c_int, P, P, I64, I64, I64, P)),
    "ggml_backend_tensor_alloc": ("base", ctypes.c_int, (P, P, P)),
    "ggml_backend_cpu_buffer_from_ptr": ("base", P, (P, ctypes.c_size_t)),
    "ggml_backend_graph_compute": ("base", ctypes.c_int, (P, P)),
    "ggml_backend_cpu_init": ("cpu", P, ()),
    "ggml_backend_cpu_set_n_threads": ("cpu", None, (P, ctypes.c_int)),
}


@functools.cache
def library() -> SimpleNamespace:
    """The functions of ggml by name, and ``backend``, one of its CPU backends; loaded once.

    The package itself is not imported. Raises ``ToolchainError`` where it is missing or another ggml.
    """
    folder = package_folder("llama_cpp") / "lib"
    found = SimpleNamespace()
    try:
        libraries = {
            part: ctypes.CDLL(str(folder / f"libggml-{part}.so"), mode=ctypes.RTLD_GLOBAL)
            for part in ("base", "cpu")
        }
        for name, (part, result, arguments) in _FUNCTIONS.items():
            function = getattr(libraries[part], name)
            function.restype, function.argtypes = result, arguments
            setattr(found, name, function)
    except (OSError, AttributeError) as error:
        raise ToolchainError(f"llama_cpp: its ggml does not load: {error}") from None
    found.backend = found.ggml_backend_cpu_init()
    return found


def package_folder(package: str) -> Path:
    """Where an installed package lies."""
    spec = importlib.util.find_spec(package) if installed(package) else None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ToolchainError(f"{package}: not installed; see kvgen bench --list-peers")
    return Path(places[0])


class Flash:
    """A graph of one node for each set of memory."""

    def __init__(self, scene: Scene, form: str, name: str) -> None:
        shape, case = scene.shape, scene.case
        if not shape.plain:
            raise UnsupportedError("a window, or attention that is not causal, is not in its plain form")
        if len(case.groups) > 1:
            raise UnsupportedError("one call takes requests of one length only")
        if form in BLOCK_BYTES and (shape.head_dim % 32 or shape.v_head_dim % 32):
            raise UnsupportedError(f"{form} needs rows of a multiple of 32")
        self.scene, self.format, self.name, self.tolerance = scene, form, name, TOLERANCE[form]
        self._ggml = library()
        self._held: list[Any] = []
        (batch, queries, keys), elements = case.groups[0], case.keys * shape.kv_heads
        row = _row_bytes(form, shape.head_dim) + _row_bytes(form, shape.v_head_dim)
        self.nbytes = elements * row
        self.sets = scene.sets(self.nbytes)
        size = (
            16 * self._ggml.ggml_tensor_overhead() * self.sets + self._ggml.ggml_graph_overhead() * self.sets
        )
        self._context = self._ggml.ggml_init(_Params(size + (1 << 16), None, True))
        weakref.finalize(self, self._ggml.ggml_free, self._context)
        self._ggml.ggml_backend_cpu_set_n_threads(self._ggml.backend, scene.threads)
        self._q = scene.q.float().view(batch, queries, *scene.q.shape[1:]).transpose(1, 2).contiguous()
        self._mask = None if queries == 1 else _mask(queries, keys)
        import torch

        self._out = torch.empty(batch, queries, shape.q_heads, shape.v_head_dim)
        self._graphs = [self._graph(batch, keys) for _ in range(self.sets)]

    def call(self, turn: int) -> None:
        """One attention."""
        done = self._ggml.ggml_backend_graph_compute(self._ggml.backend, self._graphs[turn % self.sets])
        if done != OK:
            raise ToolchainError(f"llama_cpp: ggml_backend_graph_compute says {done}")

    def results(self, turn: int) -> dict[str, Tensor]:
        """The outputs as rows of queries."""
        return {"out": self._out.flatten(0, 1)}

    def _graph(self, batch: int, keys: int) -> int:
        ggml, shape = self._ggml, self.scene.shape
        q = self._tensor(self._q, "f32", tuple(self._q.shape))
        k = self._tensor(
            self._rows(self.scene.k, batch, keys), self.format, (batch, shape.kv_heads, keys, shape.head_dim)
        )
        v = self._tensor(
            self._rows(self.scene.v, batch, keys),
            self.format,
            (batch, shape.kv_heads, keys, shape.v_head_dim),
        )
        mask = None if self._mask is None else self._tensor(self._mask, "f16", (1, 1, *self._mask.shape))
        node = ggml.ggml_flash_attn_ext(self._context, q, k, v, mask, shape.scale, 0.0, 0.0)
        self._place(node, self._out)
        graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(graph, node)
        return int(graph)

    def _tensor(self, data: Tensor, form: str, shape: tuple[int, ...]) -> int:
        made = self._ggml.ggml_new_tensor_4d(self._context, TYPES[form], *reversed(shape))
        self._place(made, data)
        return int(made)

    def _place(self, tensor: int, data: Tensor) -> None:
        """Let a tensor of ggml's stand on torch's memory."""
        if self._ggml.ggml_nbytes(tensor) != data.nbytes:
            raise ToolchainError(f"llama_cpp: {self._ggml.ggml_nbytes(tensor)} bytes where {data.nbytes} are")
        buffer = self._ggml.ggml_backend_cpu_buffer_from_ptr(data.data_ptr(), data.nbytes)
        if self._ggml.ggml_backend_tensor_alloc(buffer, tensor, data.data_ptr()) != OK:
            raise ToolchainError("llama_cpp: ggml_backend_tensor_alloc failed")
        self._held.append(data)

    def _rows(self, rows: Tensor, batch: int, keys: int) -> Tensor:
        """K or V [requests, kv_heads, keys, d] in the format, as memory of its own."""
        import torch

        part = rows.unflatten(0, (batch, keys)).transpose(1, 2)
        if self.format not in BLOCK_BYTES:
            dtype = torch_type(self.format)
            return self.scene.empty(*part.shape, dtype=dtype).copy_(part)
        flat, width = part.float().contiguous(), part.shape[-1]
        made = self.scene.empty(flat.numel() // width * _row_bytes(self.format, width), dtype=torch.uint8)
        count = flat.numel() // width
        kind = TYPES[self.format]
        self._ggml.ggml_quantize_chunk(kind, flat.data_ptr(), made.data_ptr(), 0, count, width, None)
        return made


def _row_bytes(form: str, width: int) -> int:
    return width // 32 * BLOCK_BYTES[form] if form in BLOCK_BYTES else width * torch_type(form).itemsize


def _mask(queries: int, keys: int) -> Tensor:
    """f16 [queries, keys]: 0 where a query sees the key, else minus infinity."""
    import torch

    seen = torch.arange(keys)[None, :] <= torch.arange(queries)[:, None] + (keys - queries)
    return torch.zeros(queries, keys, dtype=torch.float16).masked_fill_(~seen, float("-inf"))
