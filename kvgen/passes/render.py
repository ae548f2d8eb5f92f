"""render: KernelPlan -> source text. One pass of Jinja, deterministic, nothing decided here."""

from __future__ import annotations

from functools import cache

import jinja2

from kvgen.ir.plan import KernelPlan
from kvgen.passes.verify_address import verify_source


@cache
def environment() -> jinja2.Environment:
    """The one Jinja environment: undefined names are errors, blocks leave no blank lines."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("kvgen.templates", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(plan: KernelPlan) -> str:
    """The kernel's source. Templates see ``plan``, the addresses by plane name, and the answers by name."""
    context = {
        "plan": plan,
        "spec": plan.spec,
        "att": plan.spec.attention,
        "schedule": plan.schedule.to_dict(),
    }
    text = (
        environment().get_template(plan.template).render(context | dict(plan.addresses) | dict(plan.answers))
    )
    source = _tidy(text)
    verify_source(plan, source)
    return source


def _tidy(text: str) -> str:
    """No trailing blanks; at most two blank lines in a row, two above a Triton function; one newline last."""
    lines: list[str] = []
    for line in (raw.rstrip() for raw in text.splitlines()):
        if line == "@triton.jit":
            while lines[-2:] != ["", ""]:
                lines.append("")
        if line or not (len(lines) >= 2 and lines[-1] == lines[-2] == ""):
            lines.append(line)
    return "\n".join(lines).strip("\n") + "\n"
