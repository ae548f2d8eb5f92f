"""A worker process: reads one JSON request a line, writes one JSON reply a line.

    python worker.py compile|interpret        or        python -m kvgen.backends.triton.worker ...

This file and the two handlers beside it are stand-alone (standard library, triton, numpy): the same
files must run under an interpreter that has another Triton and no kvgen. So the handler is loaded by
its path, and nothing is put on ``sys.path``, where it could shadow that interpreter's own packages.

The first line written is ``{"ready": PROTOCOL, "triton": version}``. Every later line answers one
request, in order: ``{"error": kind, "message": text}`` or the handler's own fields.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

PROTOCOL = 1
"""Raised whenever a request or a reply changes shape."""

_modules: dict[str, ModuleType] = {}


def load_module(path: str) -> ModuleType:
    """Import the Python file at ``path`` once; the same path gives the same module object."""
    if path not in _modules:
        name = Path(path).stem
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # triton looks a kernel's globals up through its module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        _modules[path] = module
    return _modules[path]


def _die_with(parent: int) -> None:
    """End this process soon after its parent: a compile that hangs must not outlive its caller."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


def main(mode: str) -> int:
    """Serve requests until standard input ends; returns the exit status."""
    # Compilers, kernels and libraries print where they like. The replies get a descriptor of their
    # own and everything else goes to standard error, which the parent keeps for its messages.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()  # a kernel that reads a wild address then names its line before it dies
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()

    handler = load_module(str(Path(__file__).with_name(f"worker_{mode}.py")))

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    reply({"ready": PROTOCOL, "triton": version("triton")})
    for line in sys.stdin:
        reply(handler.handle(json.loads(line), load_module))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["compile"], ["interpret"]):
        print("usage: worker.py compile|interpret", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1]))
