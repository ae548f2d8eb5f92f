"""The stand-in for the GPU driver, compiled, and what it wrote down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvgen.backends.cpu import toolchain


class StandIn:
    """A driver library that runs nothing, and the calls it has seen."""

    def __init__(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = Path(__file__).with_name("standin.cpp").read_text()
        self.library = toolchain.compile_shared(source, opt="-O1", name="standin")
        self._log, self._monkeypatch = log, monkeypatch
        monkeypatch.setenv("KVGEN_STANDIN_LOG", str(log))

    def fail(self, function: str, error: int) -> None:
        """Let a function of the driver fail from now on."""
        self._monkeypatch.setenv("KVGEN_STANDIN_FAIL", f"{function}:{error}")

    def calls(self, name: str = "") -> list[dict[str, Any]]:
        """The calls so far, in order; those of one function where ``name`` is given."""
        text = self._log.read_text() if self._log.exists() else ""
        found = [json.loads(line) for line in text.splitlines()]
        return [call for call in found if not name or call["call"] == name]
