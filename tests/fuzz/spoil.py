"""spoil: a right argument -> one that is wrong in some way (or only unusual), and a label that says how."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

Spoiled = tuple[str, Any]


class Subclass(torch.Tensor):
    """A plain subclass: works like a tensor."""


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [a.inner if isinstance(a, Wrapper) else a for a in args]
        return func(*inner, **(kwargs or {}))


class Lookalike:
    """Not a tensor, though it has what a hasty check looks at."""

    shape, dtype, device = (2, 2), torch.float32, torch.device("cpu")

    def data_ptr(self) -> int:
        return 64

    def dim(self) -> int:
        return 2


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 3, 5, 7, 64, 1023, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, -(2**63) - 1),
    *(True, False, 0.5, 2.5, -0.0, 1e-320, 1e39, 1e308, float("nan"), float("inf"), float("-inf")),
    *(Fraction(1, 2), 1j, np.int64(2), np.float32(0.5), np.bool_(True), np.array([1, 2]), np.array(3)),
    *("1", "", "x" * 5000, "\0", "\ud800", b"1", [1], [], (), {}, {1: 2}, None, object(), Unprintable(), int),
]


def number(rng: Random) -> Any:
    """Anything that somebody may give for a number."""
    if rng.random() < 0.1:
        return rng.choice([10**5000, -(10**5000), torch.tensor(0.5), torch.ones(2), freed(torch.ones(2))])
    return rng.choice(NUMBERS)


def junk(rng: Random, tensor: torch.Tensor | None = None) -> Any:
    """Anything but a plain tensor."""
    t = torch.zeros(2, 2) if tensor is None else tensor
    return rng.choice(
        [
            number(rng),
            [t],
            (t, t),
            {"k": t},
            t.untyped_storage(),
            torch.Tensor,
            torch.float32,
            Lookalike(),
            t.tolist() if t.numel() < 4000 else None,
            t.float().detach().numpy() if t.numel() < 4000 else None,
            [freed(t)],
        ]
    )


def freed(t: torch.Tensor) -> torch.Tensor:
    found = t.detach().clone()
    found.untyped_storage().resize_(0)
    return found


def _shrunk(t: torch.Tensor) -> torch.Tensor:
    found = t.clone()
    found.untyped_storage().resize_(found.nbytes // 2)
    return found


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    room = bytearray(t.nbytes + 64)
    view = torch.frombuffer(room, dtype=t.dtype, offset=1, count=t.numel()).reshape(t.shape)
    return view.copy_(t)


def _offset(t: torch.Tensor) -> torch.Tensor:
    flat = torch.cat([t.reshape(-1)[:1], t.reshape(-1)])
    return flat[1:].view(t.shape)


def _escaped(t: torch.Tensor) -> torch.Tensor:
    """A tensor of a ``vmap`` that is over."""
    kept: list[torch.Tensor] = []
    torch.func.vmap(lambda x: (kept.append(x), x)[1])(t[None])
    return kept[0]


def _fake(t: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(t)


def _sparse_values(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(t.shape[0], -1).to_sparse_csr()


def _wide(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
    wide[..., ::2] = t
    return wide[..., ::2]


def _strided(rng: Random, t: torch.Tensor) -> torch.Tensor:
    """Any strides at all, over memory that holds them."""
    steps = [rng.choice([0, 1, 1, 2, 3, t.shape[-1], 64]) for _ in t.shape]
    reach = sum((size - 1) * step for size, step in zip(t.shape, steps, strict=True)) + 1
    return t.new_zeros(max(reach, 1)).as_strided(t.shape, steps)


def _far(t: torch.Tensor) -> torch.Tensor:
    """Strides of axes of size one may be anything."""
    steps = [2**62 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, steps, t.storage_offset())


FORMS: dict[str, Callable[[Random, torch.Tensor], torch.Tensor]] = {
    "row": lambda r, t: t[0],
    "none": lambda r, t: t[:0],
    "short": lambda r, t: t[:-1],
    "twice": lambda r, t: torch.cat([t, t]),
    "narrow": lambda r, t: t[..., :-1],
    "no width": lambda r, t: t[..., :0],
    "scalar": lambda r, t: t.reshape(-1)[0],
    "flat": lambda r, t: t.reshape(-1),
    "outer": lambda r, t: t[None],
    "inner": lambda r, t: t[..., None],
    "permuted": lambda r, t: t.permute(r.sample(range(t.dim()), t.dim())),
    "turned": lambda r, t: t.mT.contiguous().mT,
    "wide": lambda r, t: _wide(t),
    "flipped": lambda r, t: t.flip(0),
    "expanded": lambda r, t: t[:1].expand(t.shape),
    "expanded inside": lambda r, t: t[..., :1].expand(t.shape),
    "huge": lambda r, t: t[:1].expand(r.choice([2**20, 2**31, 2**33]), *t.shape[1:]),
    "strided": _strided,
    "far": lambda r, t: _far(t),
    "offset": lambda r, t: _offset(t),
    "misaligned": lambda r, t: _misaligned(t),
    "clone": lambda r, t: t.clone(),
    "type": lambda r, t: t.to(r.choice(DTYPES)),
    "reread": lambda r, t: t.view(r.choice(DTYPES)),
    "meta": lambda r, t: t.to("meta"),
    "coo": lambda r, t: t.to_sparse(),
    "csr": lambda r, t: _sparse_values(t),
    "mkldnn": lambda r, t: t.to_mkldnn(),
    "quantised": lambda r, t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "nested": lambda r, t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda r, t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
    "subclass": lambda r, t: t.as_subclass(Subclass),
    "wrapper": lambda r, t: Wrapper(t),
    "parameter": lambda r, t: torch.nn.Parameter(t),
    "gradient": lambda r, t: t.clone().requires_grad_() * 1,
    "inference": lambda r, t: _inferred(t),
    "fake": lambda r, t: _fake(t),
    "functional": lambda r, t: torch._to_functional_tensor(t),
    "negated": lambda r, t: torch._neg_view(t),
    "conjugated": lambda r, t: torch.complex(t, t).conj().imag,
    "escaped": lambda r, t: _escaped(t),
    "freed": lambda r, t: freed(t),
    "shrunk": lambda r, t: _shrunk(t),
    "shared": lambda r, t: t.clone().share_memory_(),
}
"""Tensors in a form that a caller did not mean, or may mean."""

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
)
EDGES = (-(2**31), 2**31 - 1, -1, -2, 0, 1, 2**30, 2**63 - 1, -(2**63), 2**32, 3, 1000)


def _inferred(t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return t.clone()


def value(rng: Random, t: torch.Tensor) -> torch.Tensor:
    """Some elements replaced: by numbers at the edges of their type, or by NaN and infinities."""
    found = t.detach().clone()
    flat = found.view(-1)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(flat))
        if t.dtype.is_floating_point:
            flat[at] = rng.choice([float("nan"), float("inf"), -float("inf"), 1e30])
        else:
            info = torch.iinfo(t.dtype)
            flat[at] = min(max(rng.choice(EDGES), info.min), info.max)
    return found


def tensor(rng: Random, t: torch.Tensor) -> Spoiled:
    """A label and something else in the place of ``t``. Where a form is impossible for it, junk."""
    how = rng.random()
    label = "value" if how < 0.25 else "junk" if how < 0.37 else rng.choice(list(FORMS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if label == "value":
                return label, value(rng, t)
            return label, junk(rng, t) if label == "junk" else FORMS[label](rng, t)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:  # impossible here
        return f"{label}: {type(error).__name__}", None
