"""Buffers that end, or begin, at a page the CPU may not touch, and a child process in which to touch it.

A kernel that reads one vector past a row is right on every ordinary test: the bytes exist and their result is
thrown away. Here they do not exist. The address sanitizer (``sanitize.py``) sees less: neither masked loads
nor pools that come from mmap.

The memory is shared between processes, so what a child writes into a guarded buffer is there in the parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import mmap
import os
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

_PROT_NONE = 0
_POISON_BYTE = 0xFF  # a NaN in f64, f32, f16, bf16, e4m3fn and e5m2 alike
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded_bytes(nbytes: int, where: Literal["end", "begin"] = "end", align: int = 1) -> np.ndarray:
    """Bytes between two forbidden pages.

    Args:
        nbytes: size, at least 0.
        where: which end of the buffer touches its forbidden page; the other end does too when ``nbytes`` is a
        whole
            number of pages.
        align: alignment of the first byte, a power of two up to a page. With ``where="end"`` and a size that
        is no
            multiple of it, up to ``align - 1`` readable bytes stay behind the buffer.

    Returns:
        uint8 array of shape (nbytes,), every byte 0xFF; so is the rest of its pages.
    """
    page = mmap.PAGESIZE
    if nbytes < 0 or align < 1 or align & (align - 1) or align > page or where not in ("end", "begin"):
        raise ValueError(f"nbytes = {nbytes}, align = {align}, where = {where!r}")
    inner = max(1, -(-nbytes // page)) * page
    region = mmap.mmap(-1, inner + 2 * page)
    whole = np.frombuffer(region, np.uint8)
    whole[page : page + inner] = _POISON_BYTE
    base = whole.ctypes.data
    for forbidden in (base, base + page + inner):
        if _libc.mprotect(forbidden, page, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = page if where == "begin" else page + (inner - nbytes) // align * align
    return whole[start : start + nbytes]


def guarded_array(
    shape: tuple[int, ...],
    dtype: Any,
    where: Literal["end", "begin"] = "end",
    align: int = 1,
    fill: Any = None,
) -> np.ndarray:
    """A contiguous numpy array of ``shape`` between forbidden pages.

    Args:
        dtype: numpy type.
        where, align: as in ``guarded_bytes``.
        fill: value of every element; default: poison, which is NaN for floats and the largest value for
        integers (so
            that an unused table entry is an impossible page, not the legal -1).
    """
    kind = np.dtype(dtype)
    array = guarded_bytes(math.prod(shape) * kind.itemsize, where, align).view(kind).reshape(shape)
    if fill is not None:
        array[...] = fill
    elif kind.kind in "iu":
        array[...] = np.iinfo(kind).max
    elif kind.kind == "b":
        array[...] = True
    return array


def guarded_tensor(
    shape: tuple[int, ...],
    dtype: Any,
    where: Literal["end", "begin"] = "end",
    align: int = 1,
    fill: Any = None,
) -> Any:
    """``guarded_array`` as a torch tensor, for every torch type (bf16 and fp8 too), same arguments."""
    import torch

    flat = guarded_bytes(math.prod(shape) * dtype.itemsize, where, align)
    # torch warns about, and refuses to view, an empty array
    tensor = (
        torch.from_numpy(flat).view(dtype).reshape(shape) if flat.size else torch.empty(shape, dtype=dtype)
    )
    if fill is not None:
        tensor.fill_(fill)
    elif dtype == torch.bool:
        tensor.fill_(True)
    elif not dtype.is_floating_point and not dtype.is_complex:
        tensor.fill_(torch.iinfo(dtype).max)
    return tensor


@dataclass(frozen=True)
class GuardedRun:
    """How a child process ended."""

    value: Any
    """What the function returned (JSON types); None unless ``ok``."""
    signal: str
    """Name of the signal that ended it, e.g. SIGSEGV; empty for none."""
    error: str
    """Traceback of the exception that ended it, or what else went wrong; empty for none."""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return not self.signal and not self.error

    def check(self) -> Any:
        """The function's value; an AssertionError that says what happened when there is none."""
        if self.signal:
            raise AssertionError(f"the kernel died by {self.signal}: it touched memory outside its buffers")
        if self.error:
            raise AssertionError(f"in the guarded process:\n{self.error}")
        return self.value


def run_guarded(fn: Callable[[], Any], timeout_s: float = 60.0) -> GuardedRun:
    """Call ``fn`` in a forked copy of this process and report a fault as a value instead of dying of it.

    ``fn`` runs in a new thread of the child: libgomp's pool belongs to the thread that made it, its threads
    do not survive a fork, and the main thread's next parallel region would wait for them forever.

    Args:
        fn: returns None or JSON types. Its writes reach this process in guarded buffers only.
        timeout_s: seconds after which the child is killed and reported.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns that forking with threads may deadlock; the child takes no lock another thread may
        # hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reader)
        _child(fn, writer)
    os.close(writer)
    text, in_time = _read_all(reader, timeout_s)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not in_time:
        return GuardedRun(None, "", f"killed after {timeout_s:g} s")
    if os.WIFSIGNALED(status):
        return GuardedRun(None, signal.Signals(os.WTERMSIG(status)).name, "")
    if not text:
        return GuardedRun(None, "", f"the child exited with {os.WEXITSTATUS(status)} and said nothing")
    value, error = json.loads(text)
    return GuardedRun(value, "", error)


def _child(fn: Callable[[], Any], writer: int) -> None:
    """The child's life: run, write the outcome as JSON, leave without any of the parent's clean-up."""
    outcome: list[Any] = [None, "the thread ended early"]

    def body() -> None:
        try:
            outcome[:] = [fn(), ""]
        except BaseException:  # noqa: BLE001 - goes to the parent as text, pytest's own outcomes included
            outcome[:] = [None, traceback.format_exc()]

    code = 1
    try:
        faulthandler.disable()  # pytest's; every expected fault would print all threads' tracebacks
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        try:
            text = json.dumps(outcome)
        except TypeError as error:
            text = json.dumps([None, f"fn returned no JSON type: {error}"])
        with os.fdopen(writer, "w") as stream:
            stream.write(text)
        code = 0
    finally:
        os._exit(code)


def _read_all(reader: int, timeout_s: float) -> tuple[str, bool]:
    """Everything written to the pipe until its writer is gone, and whether that came in time."""
    deadline = time.monotonic() + timeout_s
    parts = []
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while True:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return "", False
            part = stream.read(65536)
            if not part:
                return b"".join(parts).decode(), True
            parts.append(part)
