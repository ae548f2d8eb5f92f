"""The compile worker's handler: one kernel in, one binary out. Needs triton, no GPU and no driver."""

from __future__ import annotations

import base64
import inspect
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources

# What a launcher needs to know, under Triton's own names; absent ones (older versions) are zero.
_METADATA = ("shared", "num_warps", "num_stages", "num_ctas", "warp_size", "tmem_size",
             "global_scratch_size", "global_scratch_align",
             "profile_scratch_size", "profile_scratch_align")  # fmt: skip
_RESOURCE_WORDS = ("out of resource", "uses too much", "exceeds limit", "insufficient registers")


def handle(request: dict[str, Any], load_module: Callable[[str], ModuleType]) -> dict[str, Any]:
    """Compile one kernel; every failure of the compiler becomes a reply, never an exception."""
    try:
        return _compile(request, load_module)
    except (MemoryError, OutOfResources) as error:
        return {"error": "resource", "message": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001 - it may raise anything, and the reply carries all of it
        text = str(error)
        resource = any(word in text.lower() for word in _RESOURCE_WORDS)
        return {"error": "resource" if resource else "compile_error", "message": _explain(error)}


def _explain(error: BaseException) -> str:
    """The compiler's message, with the chain of causes and without this worker's own frames."""
    parts: list[str] = []
    link: BaseException | None = error
    while link is not None:
        parts.append("".join(traceback.format_exception_only(link)).strip())
        link = link.__cause__
    return "\ncaused by ".join(parts)


def _compile(request: dict[str, Any], load_module: Callable[[str], ModuleType]) -> dict[str, Any]:
    module = load_module(request["path"])
    function = getattr(module, request["kernel"], None)
    if not isinstance(function, triton.JITFunction):
        raise TypeError(f"{request['kernel']} is not a @triton.jit function of the module")
    signature: dict[str, str] = request["signature"]
    if list(signature) != list(function.arg_names):
        raise TypeError(
            f"signature {list(signature)} does not match the parameters of {request['kernel']}"
            f"{inspect.signature(function.fn)}"
        )
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=request["constants"],
        attrs={(index,): [["tt.divisibility", 16]] for index in request["aligned"]},
    )
    options = {
        "num_warps": request["num_warps"],
        "num_stages": request["num_stages"],
        "enable_fp_fusion": request["fp_fusion"],
    }
    if request["maxnreg"] is not None:
        options["maxnreg"] = request["maxnreg"]
    target = GPUTarget(request["backend"], request["arch"], request["warp_size"])
    compiled = triton.compile(source, target=target, options=options)
    metadata = compiled.metadata._asdict()
    return {
        "binary": base64.b64encode(compiled.asm[request["binary"]]).decode("ascii"),
        "assembly": compiled.asm[request["assembly"]],
        "metadata": {"name": metadata["name"], **{key: metadata.get(key, 0) for key in _METADATA}},
    }
