"""source_digest: whether a template edit has changed a kernel at all.

Templates serve every spec, so most edits leave most kernels as they were. Winners are compared by the code
that is compiled, without comments and without what names it: the entry, and the hash of the spec, of which an
op reads a part.
"""

from __future__ import annotations

import hashlib
import re

from kvgen.ir import Schedule, Spec, Target


def source_digest(op: str, spec: Spec, target: Target, schedule: Schedule) -> str:
    """16 digits of the sha256 of the code that is rendered for all variants of ``op``."""
    from kvgen.passes.abi import VARIANTS
    from kvgen.passes.code_only import cpp_code, python_code
    from kvgen.passes.place import place
    from kvgen.passes.plan_cpu import plan_cpu
    from kvgen.passes.plan_triton import plan_triton
    from kvgen.passes.render import render

    plan, code = (plan_cpu, cpp_code) if target.backend == "cpu" else (plan_triton, python_code)
    record, digest = place(spec), hashlib.sha256()
    for variant in VARIANTS[op]:
        text = code(render(plan(op, spec, record, schedule, target, variant)))
        text = text.replace(spec.hash, "").replace(spec.hash8, "")
        digest.update(re.sub(r"\bkvgen_[a-z]+_[0-9a-f]{8}", "kvgen", text).encode())
    return digest.hexdigest()[:16]
