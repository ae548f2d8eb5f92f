"""judge: run a call and say whether what happened may happen."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kvgen.errors import KvgenError
from tests.fuzz.scene import Call, Memory

SIGNATURE = re.compile(
    r"unexpected keyword argument|missing \d+ required|positional argument|multiple values for"
)
OURS = re.compile(r"/(runtime|kvgen)/[^ ]*\.py$")
LONGEST = 1200
"""Characters of an error message; a spec with several mistakes may take them."""


@dataclass(frozen=True)
class Finding:
    """Something that must not happen."""

    where: str
    """What tells it from others."""
    call: str
    what: str


def judge(call: Call, memory: Memory) -> tuple[Any, Finding | None]:
    """Run the call; the result (None where it was refused) and what is wrong."""
    try:
        result = call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - what it may be is the question
        if wrong := _refused(call, error):
            return None, wrong
        # Torch resolves negated tensors in a fallback of its own, which fails only after the op has run.
        ours = isinstance(error, KvgenError) or not call.signatures
        if ours and (moved := memory.changed([])):
            return None, Finding(f"{call.name}: refused, but wrote", call.name, f"{moved} ({error})")
        return None, None
    if moved := memory.changed(call.writes(call)):
        return None, Finding(f"{call.name}: wrote elsewhere", call.name, moved)
    memory.keep()
    if call.signatures and any(_stands_for_another(value) for value in call.args.values()):
        return None, None  # shapes for shapes, from the op's fake
    try:
        if wrong_result := call.check(call, result):
            return None, Finding(f"{call.name}: result", call.name, wrong_result)
    except BaseException as error:  # noqa: BLE001 - a result that cannot be looked at is wrong
        return None, Finding(f"{call.name}: use: {_place(error)}", call.name, _tail(error))
    return result, None


def _stands_for_another(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value.is_meta)


def _refused(call: Call, error: BaseException) -> Finding | None:
    """Whether an exception is one that a caller should see."""
    text = str(error)
    if isinstance(error, KvgenError):
        if not text or len(text) > LONGEST:
            return Finding(f"{call.name}: message", call.name, f"{len(text)} characters: {text[:300]}")
        return None
    if isinstance(error, TypeError) and SIGNATURE.search(text):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame.name for frame in frames if OURS.search(frame.filename)]
    if call.signatures and (not ours or ours[-1].startswith("_fake_")):
        return (
            None  # torch's dispatcher, or a transform, refused it before us, or asked for shapes of nothing
        )
    return Finding(_place(error), call.name, _tail(error))


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if OURS.search(frame.filename)] or list(frames)
    last = ours[-1]
    name = "/".join(last.filename.split("/")[-2:])
    return f"{type(error).__name__} at {name}:{last.lineno}"


def _tail(error: BaseException) -> str:
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-4:])
    return f"{type(error).__name__}: {str(error)[:300]}\n{''.join(frames)}"


def same(one: Any, two: Any) -> bool:
    """Whether two results have the same bits."""
    if isinstance(one, tuple) and isinstance(two, tuple):
        return all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, torch.Tensor):
        return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
    return True


Around = Callable[[Callable[[], Any]], Any]
