"""Kernels that are broken on purpose, and the small spec they are broken for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvgen.backends.cpu.backend import CpuBackend
from kvgen.backends.cpu.job import Job
from kvgen.ir import Spec
from kvgen.ir.plan import KernelPlan
from kvgen.passes.validate import load_spec

Edit = Callable[[KernelPlan, str], str]


class Faulty(CpuBackend):
    """A backend whose rendered sources are edited before they are compiled."""

    def __init__(self, edit: Edit) -> None:
        super().__init__(opt="-O1")
        self._edit = edit
        self.compiled: list[KernelPlan] = []

    def job(self, plan: KernelPlan) -> Job:
        """The build request with the edited source."""
        self.compiled.append(plan)
        job = super().job(plan)
        return dataclasses.replace(job, sources=(self._edit(plan, job.sources[0]),))


def small(**attention: Any) -> Spec:
    """4 query heads over 2 KV heads, f32 throughout, pages of 37 tokens (tiles 16 and 32 become the same)."""
    return load_spec(
        {
            "name": "small",
            "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "q_dtype": "f32"} | attention,
            "cache": {
                "page_size": 37,
                "layout": "page kv head tok d",
                "k": {"format": "f32"},
                "v": {"format": "int8", "group": {"tok": 1, "head": 1}},
            },
        }
    )
