"""Run Triton kernels on CPU tensors through Triton's interpreter, in a process of its own.

Known faults of the interpreter that templates must work around (Triton 3.9): arithmetic and ``tl.dot``
on bf16 treat the bits as integers, so upcast right after the load; f32 to bf16 truncates; inline
assembly is refused. About 2 ms a program instance and no parallelism.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvgen import errors
from kvgen.backends.triton.arena import Arena
from kvgen.backends.triton.files import write_module
from kvgen.backends.triton.memory import Pointer, is_tensor, merged, pointer_to
from kvgen.backends.triton.process import WorkerDied, WorkerProcess, WorkerTimeout
from kvgen.backends.triton.source import Constant, TritonSource
from kvgen.errors import ArgumentError, ToolchainError

_GRID_LIMITS = (2**31 - 1, 65535, 65535)  # CUDA's: what runs here must be launchable there


class _State:
    """What must be cleaned up when the client goes: kept apart so that a finalizer can hold it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="kvgen-interpret-"))
        self.arena = Arena(self.folder)
        self.worker: WorkerProcess | None = None

    def stop(self) -> None:
        """Kill the worker, if there is one."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None

    def close(self) -> None:
        if os.getpid() == self.owner:  # a forked child inherits this object, not the worker
            self.stop()
            self.arena.close()
            shutil.rmtree(self.folder, ignore_errors=True)


class InterpreterClient:
    """A persistent interpreter process, started by the first launch and ended with this object.

    Safe to share between threads: launches run one after the other. A worker that dies or does not
    answer in time costs its launch; the next one starts another.
    """

    def __init__(
        self, *, module_dir: Path | None = None, python: str = sys.executable, timeout_s: float = 600.0
    ) -> None:
        """``module_dir``: where rendered modules are written (default: a temporary folder of this
        client's). ``python``: an interpreter with triton and numpy. ``timeout_s``: the most one launch
        may take, in seconds."""
        self._python, self._timeout_s = python, timeout_s
        self._state = _State()
        self._modules = module_dir if module_dir is not None else self._state.folder / "modules"
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, self._state.close)

    def __enter__(self) -> InterpreterClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and remove the shared files. A launch after this raises ToolchainError."""
        self._finalizer()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the running worker, None before the first launch."""
        worker = self._state.worker
        return worker.pid if worker is not None and worker.alive else None

    def launch_source(
        self,
        source: TritonSource,
        grid: Sequence[int],
        args: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Launch ``source`` with the argument types of its signature, as the compiled kernel has them."""
        types = dict(source.launch_arguments)
        self.launch(
            source.text, source.kernel, grid, args, source.constants, signature=types, timeout_s=timeout_s
        )

    def launch(
        self,
        text: str,
        kernel: str,
        grid: Sequence[int],
        args: Mapping[str, Any],
        constants: Mapping[str, Constant],
        *,
        signature: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Run ``kernel`` of module ``text`` over ``grid`` (1 to 3 block counts; 0 launches nothing).

        ``args`` maps each run-time argument to a torch CPU tensor, a numpy array, an int, a float, a
        bool or None. ``signature`` gives their Triton types; without it they are what ``triton.jit``
        would infer: the tensor's type, i32 or i64 by value, fp32. A pointer's declared type wins over
        the tensor's, as in a compiled kernel. None is a null pointer where the signature has a pointer
        and None otherwise. Tensors are changed in place, and only when the launch succeeds.

        Raises ArgumentError for arguments the kernel cannot take, UnsupportedError for what the
        interpreter lacks, ToolchainError with the traceback for everything a kernel raises, for a write
        outside the tensors, and for a worker that died or ran out of time.
        """
        blocks = _checked_grid(grid)
        if 0 in blocks:
            return
        pointers = {name: pointer_to(name, value) for name, value in args.items() if is_tensor(value)}
        types = dict(signature or {})
        with self._lock:
            if not self._finalizer.alive:
                raise ToolchainError("this InterpreterClient is closed")
            arena = self._state.arena
            arena.place(merged(pointer.storage for pointer in pointers.values()))
            arguments = {
                name: _argument(name, value, types.get(name), pointers.get(name), arena)
                for name, value in args.items()
            }
            request = {
                "path": str(write_module(text, self._modules)), "kernel": kernel, "grid": blocks,
                "arena": str(arena.path), "arguments": arguments, "constants": dict(constants),
            }  # fmt: skip
            reply = self._ask(kernel, request, self._timeout_s if timeout_s is None else timeout_s)
            if "error" in reply:
                kinds = {"ArgumentError": errors.ArgumentError, "UnsupportedError": errors.UnsupportedError}
                raise kinds.get(reply["error"], ToolchainError)(reply["message"])
            arena.copy_back()

    def _ask(self, kernel: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        state = self._state
        if state.worker is not None and not state.worker.alive:
            state.stop()
        if state.worker is None:
            environment = {
                "TRITON_INTERPRET": "1",
                "TRITON_HOME": str(state.folder),
                "TRITON_CACHE_DIR": str(state.folder / "triton"),
            }
            state.worker = WorkerProcess(
                "interpret", python=self._python, folder=state.folder, env=environment
            )
            try:
                state.worker.wait_ready()
            except ToolchainError:
                state.stop()
                raise
        try:
            state.worker.send(request)
            return state.worker.receive(timeout_s)
        except WorkerDied as death:
            state.stop()
            raise ToolchainError(f"the interpreter died in {kernel}: {death}") from None
        except WorkerTimeout:
            state.stop()
            raise ToolchainError(f"{kernel} did not finish in {timeout_s:g} s in the interpreter") from None


def _checked_grid(grid: Sequence[int]) -> list[int]:
    blocks = [int(n) for n in grid]
    if not 1 <= len(blocks) <= 3:
        raise ArgumentError(f"grid = {tuple(blocks)}: needs one to three block counts")
    for axis, (count, limit) in enumerate(zip(blocks, _GRID_LIMITS, strict=False)):
        if not 0 <= count <= limit:
            raise ArgumentError(f"grid[{axis}] = {count}: must be 0 to {limit}")
    return blocks


def _argument(
    name: str, value: Any, kind: str | None, pointer: Pointer | None, arena: Arena
) -> dict[str, Any]:
    """The message that describes one run-time argument."""
    if pointer is not None:
        if kind is not None and not kind.startswith("*"):
            raise ArgumentError(f"{name}: a tensor where the signature has {kind}")
        return {"kind": kind or pointer.kind, "offset": arena.offset_of(pointer.address, pointer.storage)}
    if value is None:
        if kind is not None and not kind.startswith("*"):
            raise ArgumentError(f"{name}: None where the signature has {kind}")
        return {"kind": kind, "offset": None}
    if kind is not None and kind.startswith("*"):
        raise ArgumentError(f"{name} = {value!r}: the signature has {kind}; pass a tensor or None")
    if isinstance(value, bool):
        return {"kind": kind or "i1", "value": value}
    if isinstance(value, int):
        fits = -(2**31) <= value < 2**31
        return {"kind": kind or ("i32" if fits else "i64"), "value": value}
    if isinstance(value, float):
        return {"kind": kind or "fp32", "value": value}
    raise ArgumentError(f"{name} = {value!r}: use a tensor, an int, a float, a bool or None")
