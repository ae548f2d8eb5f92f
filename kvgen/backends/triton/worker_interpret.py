"""The interpreter worker's handler: runs a kernel on memory it shares with its caller.

Needs triton and numpy, not torch: Triton's interpreter works on addresses, so arguments are built as
Triton values of the very types that the compiled kernel has.
"""

from __future__ import annotations

import mmap
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

_SCALARS: dict[str, Any] = {
    "i1": np.bool_, "u1": np.bool_, "i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16,
    "i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64,
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip

_mapped: tuple[str, mmap.mmap, int] | None = None


def _base_address(path: str) -> int:
    """Address of the arena file at ``path``, mapped once (the caller renames it when it grows)."""
    global _mapped
    if _mapped is None or _mapped[0] != path:
        with open(path, "rb+") as stream:
            memory = mmap.mmap(stream.fileno(), 0)
        _mapped = (path, memory, np.frombuffer(memory, np.uint8).ctypes.data)
    return _mapped[2]


def handle(request: dict[str, Any], load_module: Callable[[str], ModuleType]) -> dict[str, Any]:
    """Run one launch; every failure becomes a reply that names one of kvgen's errors."""
    try:
        function = getattr(load_module(request["path"]), request["kernel"], None)
        if not isinstance(function, InterpretedFunction):
            raise TypeError(f"{request['kernel']} is not a @triton.jit function of the module")
        expected, given = set(function.arg_names), {*request["arguments"], *request["constants"]}
        if expected != given:
            missing, unknown = sorted(expected - given), sorted(given - expected)
            message = f"{request['kernel']}: missing arguments {missing}, unknown {unknown}"
            return {"error": "ArgumentError", "message": message}
        base = _base_address(request["arena"])
        arguments = {name: _value(argument, base) for name, argument in request["arguments"].items()}
        function[tuple(request["grid"])](**arguments, **request["constants"])
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and the reply carries all of it
        message = "".join(traceback.format_exception(error)).strip()
        return {"error": "UnsupportedError" if _unsupported(error) else "ToolchainError", "message": message}
    return {}


def _unsupported(error: BaseException | None) -> bool:
    """Whether the interpreter lacks something (it raises NotImplementedError, then wraps it)."""
    while error is not None:
        if isinstance(error, NotImplementedError):
            return True
        error = error.__cause__
    return False


def _value(argument: dict[str, Any], base: int) -> Any:
    kind = argument.get("kind")
    if kind is None:
        return None
    kind_of = tl.str_to_ty(kind, None)
    if kind.startswith("*"):
        address = 0 if argument["offset"] is None else base + argument["offset"]
        return tl.tensor(TensorHandle(np.array([address], np.uint64), kind_of), kind_of)
    if kind not in _SCALARS:
        raise NotImplementedError(f"a scalar argument of type {kind}")
    return tl.tensor(TensorHandle(np.array([argument["value"]], _SCALARS[kind]), kind_of), kind_of)


def _mend_index() -> None:
    """Let a run-time scalar be a loop bound under numpy 2.4 and later.

    Triton 3.6 converts it with ``int(array of shape (1,))``, which numpy no longer allows; 3.9 squeezes it
    first. The interpreter patches ``tl.tensor`` anew for each launch, so its patch is what is mended.
    """
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if not triton.knobs.runtime.interpret:
    raise RuntimeError("the interpreter worker must be started with TRITON_INTERPRET=1")
if triton.__version__.startswith(("3.6.", "3.7.", "3.8.")):
    _mend_index()
