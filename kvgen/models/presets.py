"""Ways to store K and V by short names; docs/quality.md says what each costs a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvgen.errors import ArgumentError
from kvgen.names import FORMAT, told

ROW = {"tok": 1, "head": 1}
"""A scale for each token and head."""


@dataclass(frozen=True)
class Preset:
    """What a name stands for: the keys of [cache], but for what the model and ``page_size`` decide."""

    doc: str
    """One line for people."""
    k: Mapping[str, Any]
    v: Mapping[str, Any]
    page_size: int = 16
    """Tokens of a page where no others are asked for."""
    rest: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of [cache]."""


def _plain(doc: str, form: str, **keys: Any) -> Preset:
    """K and V alike."""
    side = {"format": form, **keys}
    return Preset(doc, side, side)


def _affine(form: str, **group: int) -> dict[str, Any]:
    return {"format": form, "affine": True, "scale_dtype": "f16", "group": {"head": 1, **group}}


def _kivi(form: str) -> Preset:
    """K scaled per channel over 32 tokens, V per token over 32 channels; the ends stay unquantised."""
    return Preset(
        f"{form} on KIVI's axes: K per channel of 32 tokens, V per 32 channels; ends left unquantised",
        _affine(form, tok=32, d=1),
        _affine(form, tok=1, d=32),
        page_size=32,
        rest={"keep_first": 4, "keep_last": 32},
    )


_ROTATED = _affine("int4", tok=1) | {"transform": "hadamard"}

PAGES: dict[str, Preset] = {
    "f32": _plain("as computed", "f32"),
    "bf16": _plain("the upper half of f32", "bf16"),
    "int8": _plain("one scale for each token and head", "int8", group=ROW),
    "int8-channel": Preset(
        "K per channel of 32 tokens, V per token, both with a minimum",
        _affine("int8", tok=32, d=1),
        _affine("int8", tok=1),
        page_size=32,
    ),
    "fp8": _plain("e4m3, one scale for each token and head", "e4m3", group=ROW),
    "int4": _kivi("int4"),
    "int3": _kivi("int3"),
    "int2": _kivi("int2"),
    "int4-rotated": Preset(
        "rows rotated, then one scale and minimum for each token and head", _ROTATED, _ROTATED
    ),
    "mxfp4": _plain("e2m1, a power of two for each 32 elements", "mxfp4"),
    "nvfp4": _plain("e2m1, an e4m3 scale for each 16 elements, one f32 scale for all", "nvfp4"),
}
"""The presets by name, in the order of their cost."""


def check_pages(pages: str, option: str = "--pages") -> None:
    """Refuse what is no key of ``PAGES`` with an ``ArgumentError``, before any model is loaded for it."""
    if pages not in PAGES:
        hint = told(pages, PAGES, FORMAT)
        raise ArgumentError(f"{option} {pages}: no such pages; {hint}There are {', '.join(PAGES)}")
