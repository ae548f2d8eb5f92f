"""K before its rotation, for pages that keep it so: transformers' code rotates before anybody is asked."""

from __future__ import annotations

from typing import Any

from kvgen.runtime.base import Tensor


def model_rope(config: Any) -> dict[str, Any] | None:
    """[attention.rope] of a model by its transformers' config; None for rotations other than the plain one.

    Plain is: one base for all layers, halves of a whole row rotated together.
    """
    given = config.rope_parameters or {}
    plain = given.get("rope_type", "default") == "default" and given.get("partial_rotary_factor", 1.0) == 1.0
    if not plain or "rope_theta" not in given or getattr(config, "kv_lora_rank", None):
        return None
    return {"theta": float(given["rope_theta"]), "pairing": "half"}


def unrotated(k_THD: Tensor, table_PD: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate rows back by their positions' angles: exact but for one rounding of f32.

    ``table_PD`` as ``rope_table`` of a library makes it: cosines, then sines, for half of d each.
    """
    import torch

    cos, sin = (part[:, None] for part in table_PD[positions_T].chunk(2, -1))
    a, b = k_THD.float().chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
