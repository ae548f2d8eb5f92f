"""Where a launch goes: the interpreter's process, or triton's own JIT on the GPU that torch sees."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kvgen import paths
from kvgen.backends.triton.files import write_module
from kvgen.backends.triton.interpret import InterpreterClient
from kvgen.backends.triton.launch import Launch
from kvgen.backends.triton.source import TritonSource
from kvgen.errors import ToolchainError

_TORCH = {
    "*fp32": "float32",
    "*bf16": "bfloat16",
    "*fp16": "float16",
    "*i8": "int8",
    "*i16": "int16",
    "*i32": "int32",
    "*i64": "int64",
}


@functools.cache
def interpreter() -> InterpreterClient:
    """The one interpreter process of this process, started by its first launch."""
    return InterpreterClient()


@functools.cache
def present() -> tuple[str, str]:
    """(architecture, "") of the GPU that torch can use, else ("", the reason why there is none)."""
    try:
        import torch
    except ImportError as error:
        return "", f"kernels are launched through torch, which is not here ({error})"
    if not torch.cuda.is_available():
        return "", f"torch {torch.__version__} can use no GPU here; kernels are only compiled and inspected"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0], ""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}", ""


def why_not(target: str) -> str:
    """Empty where torch has a device of this architecture, else the reason why nothing can be launched."""
    found, reason = present()
    if reason or found == target:
        return reason
    return f"the GPU here is {found}, these kernels are for {target}"


def present_target(alias: str) -> str:
    """The target that ``cuda`` or ``hip`` stands for here; ``ToolchainError`` where there is no such GPU."""
    found, reason = present()
    if reason:
        raise ToolchainError(f"target {alias!r}: {reason}; name an architecture, for example 'sm_90'")
    if found.startswith("sm_") != (alias == "cuda"):
        other = "cuda" if alias == "hip" else "hip"
        raise ToolchainError(f"target {alias!r}: the GPU here is {found}; use target {other!r}")
    return found


def run_jit(target: str, source: TritonSource, launch: Launch, arguments: Mapping[str, Any]) -> None:
    """Launch through ``triton.jit``, which compiles on the first call and loads the binary.

    Raises ToolchainError with the reason where there is no such GPU.
    """
    if reason := why_not(target):
        raise ToolchainError(reason)
    function = getattr(_module(source.text), source.kernel)
    limit = {} if source.maxnreg is None else {"maxnreg": source.maxnreg}  # NVIDIA's option only
    function[launch.grid](
        *(_typed(arguments[name], kind) for name, kind in source.launch_arguments),
        num_warps=source.num_warps,
        num_stages=source.num_stages,
        enable_fp_fusion=source.fp_fusion,
        **limit,
    )


@functools.cache
def _module(text: str) -> ModuleType:
    """The rendered module, imported from a file because ``triton.jit`` reads its source back."""
    path = write_module(text, paths.subfolder("triton") / "modules")
    spec = importlib.util.spec_from_file_location(f"kvgen_rendered_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ToolchainError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _typed(value: Any, kind: str) -> Any:
    """A tensor as the pointer type the kernel has (the workspace is given as bytes); scalars as they are."""
    if not kind.startswith("*"):
        return value
    import torch
    import triton
    import triton.language as tl

    wanted = _TORCH[kind]
    return value if value.dtype == getattr(torch, wanted) else triton.reinterpret(value, getattr(tl, wanted))
