"""capture: the values that a kernel's launch would get, from a call of the ops that launches nothing."""

from __future__ import annotations

from typing import Any

from kvgen.ir import PageRecord, Spec
from kvgen.runtime.base import Launchable
from kvgen.runtime.ops import CacheOps


class Capture(CacheOps):
    """The ops' front-end with no kernels behind it: checks and packing as in a real call."""

    def __init__(self, spec: Spec, record: PageRecord | None = None, device: str = "cpu") -> None:
        """``record`` is needed by ``new_cache`` and ``adopt`` only; ``device`` is where caches must be."""
        self.spec, self.checked, self._device = spec, False, device
        if record is not None:
            self.record = record
        self.op = self.variant = ""
        """The kernel that was asked for last."""
        self.values: dict[str, Any] = {}
        """What it would have been launched with, by ABI name."""

    @property
    def device(self) -> str:
        """Where caches must be."""
        return self._device

    def kernel(self, op: str, variant: str = "") -> Launchable:
        """This object, which launches nothing."""
        self.op, self.variant = op, variant
        return self

    def workspace(self, values: Any) -> int:
        """No bytes: the caller that launches the values adds a workspace."""
        return 0

    def launch(self, values: Any) -> None:
        """Keep the values."""
        self.values = dict(values)
