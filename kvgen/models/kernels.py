"""The kernels for a model's pages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgen.ir import Spec
    from kvgen.library import Library


def built(specs: Sequence[Spec]) -> tuple[Library, ...]:
    """The library of each layer, one for all layers of a spec."""
    made = {spec.hash: _built(spec) for spec in {spec.hash: spec for spec in specs}.values()}
    return tuple(made[spec.hash] for spec in specs)


def _built(spec: Spec) -> Library:
    """The library of ``spec`` with all kernels that a model in f32 needs.

    That its schedules are not tuned is no news to who runs a model.
    """
    from kvgen.builder import build
    from kvgen.tune.choose import UntunedWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        library = build(spec)
    for op, variant in (("append", "f32"), ("decode", "single"), ("decode", "multi"), ("prefill", "")):
        library.kernel(op, variant)  # now rather than within the first step
    return library
