"""Elements of parameters, and expressions that read them, as C++ text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvgen.ir import Param
from kvgen.ir.expression import Load, Node, names_of
from kvgen.passes.cpu_text import C_TYPES
from kvgen.passes.print_terms import print_c

STORED = {name: C_TYPES[name] for name in ("f32", "i32", "i64")} | dict.fromkeys(
    ("bool", "bits"), C_TYPES["u8"]
)
"""C++ type behind the pointer of a parameter."""


def printed(node: Node, names: Mapping[str, str], load: Callable[[Load], str]) -> str:
    """C++ text; names that are not given are called what they are: constants, bounds."""
    return print_c(node, {**{name: name for name in names_of(node)}, **names}, load)


def element(param: Param, load: Load, text: Callable[[Node], str]) -> str:
    """An element of a parameter; rows before the first position read at position 0."""
    where = [
        f"std::max<int64_t>(0, {text(node)})" if dim == "kv" else text(node)
        for dim, node in zip(param.dims, load.index, strict=True)
    ]
    parts = [offset(param, dim, at) for dim, at in zip(param.dims[:-1], where[:-1], strict=True)]
    if param.dtype != "bits":
        return read_text(param.dtype, f"a.param_{param.name}", " + ".join([*parts, where[-1]]))
    base = " + ".join([f"a.param_{param.name}", *parts])
    return read_text(param.dtype, f"({base})" if parts else base, where[-1])


def offset(param: Param, dim: str, at: str) -> str:
    """Elements to index ``at`` of a dim; the last is contiguous."""
    return (
        at
        if dim == param.dims[-1]
        else f"{at if at.isidentifier() else f'({at})'} * a.param_{param.name}_stride_{dim}"
    )


def read_text(dtype: str, base: str, at: str) -> str:
    """An element as its expression's type; bits are eight to a byte, the first in the lowest."""
    if dtype == "bits":
        return f"({base}[{at} / 8] >> {at} % 8 & 1) != 0"
    if dtype == "bool":
        return f"{base}[{at}] != 0"
    return f"{base}[{at}]" if dtype == "f32" else f"(int64_t){base}[{at}]"
