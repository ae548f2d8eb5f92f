"""transformers' own model code on kvgen's pages: an attention function, a mask function and a cache.

A batch is one packed row (1, T) without padding. Each layer's ``update`` hands its K and V over, and the
attention function appends them to the layer's pages and attends over these. The handle of the step travels
as a keyword of the forward call, so that nothing is kept between calls and nothing is global.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.models import latent
from kvgen.models.rotation import unrotated
from kvgen.runtime.attend import attend
from kvgen.runtime.base import Tensor
from kvgen.runtime.layers import Layer
from kvgen.runtime.step import Step

if TYPE_CHECKING:
    from kvgen.models.shape import ModelShape

NAME = "kvgen"
"""The attention implementation's name in transformers."""

OUTSIDE = (
    "attention 'kvgen': this forward is outside a step of kvgen's engine (generate() of transformers, a "
    "StaticCache or a padded batch cannot run on pages); use kvgen.runtime.engine.Engine, or "
    "set_attn_implementation('sdpa') for transformers' own caches"
)


class StepPages:
    """The pages of all layers during one step: takes each layer's K and V once, and attends once."""

    def __init__(self, step: Step, layers: Sequence[Layer]) -> None:
        self.step = step
        self.layers = layers
        self._held: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._tables: dict[int, Tensor] = {}

    def receive(self, at: int, key_1HTD: Tensor, value_1HTD: Tensor) -> tuple[Tensor, Tensor]:
        """Hold the new K and V of layer ``at`` until its attention runs; returns what its code goes on with.

        Where the spec's V is a part of K they are a latent and its rotated part.
        """
        rows = self.step.tokens_T.shape[0]
        if key_1HTD.shape[0] != 1 or key_1HTD.shape[2] != rows:
            raise ArgumentError(
                f"key: shape {tuple(key_1HTD.shape)}, but this step is one packed row of {rows} tokens"
            )
        if self.layers[at].library.spec.cache.alias:
            self._held[at] = (latent.latent_row(key_1HTD, value_1HTD), None)
            # transformers now expands every row it gets, needlessly: one is the least it can expand.
            return key_1HTD[:, :, :1], value_1HTD[:, :, :1]
        k_THD = key_1HTD[0].transpose(0, 1)
        table = self._rotates_when_read(at)
        if table is not None:
            k_THD = unrotated(k_THD, table, self.step.positions_T)
        self._held[at] = (k_THD, value_1HTD[0].transpose(0, 1))
        return key_1HTD, value_1HTD

    def attend(self, module: Any, query_1HTD: Tensor, scale: float | None, sinks_H: Tensor | None) -> Tensor:
        """Append what the module's layer handed over, and attend: (1, T, q_heads, v_head_dim)."""
        at = module.layer_idx
        if at not in self._held:
            raise ArgumentError(OUTSIDE)
        (k_THD, v_THD), layer = self._held.pop(at), self.layers[at]
        q_THD = query_1HTD[0].transpose(0, 1)
        if v_THD is None:
            q_THD = latent.absorb(module, q_THD)
        params: dict[str, Tensor] = {} if sinks_H is None else {"sink_logit": sinks_H.detach().float()}
        table = self._rotates_when_read(at)
        if table is not None:
            params["rope_table"] = table
        out_THD = attend(layer, q_THD, k_THD, v_THD, self.step, scale=scale, params=params or None)
        return (latent.expand(module, out_THD) if v_THD is None else out_THD)[None]

    def _rotates_when_read(self, at: int) -> Tensor | None:
        """The angles of a layer whose pages keep K unrotated, for every position of this step."""
        library = self.layers[at].library
        if library.spec.attention.rope is None:
            return None
        if id(library) not in self._tables:
            self._tables[id(library)] = library.rope_table(int(self.step.kv_lens_B.max()))
        return self._tables[id(library)]

    def check(self, module: Any, options: Mapping[str, Any]) -> None:
        """Refuse a layer whose spec does not describe what its code asks for."""
        att = self.layers[module.layer_idx].library.spec.attention
        for name, value, own in (
            ("sliding_window", options.get("sliding_window"), None if att.window is None else att.window + 1),
            ("softcap", options.get("softcap"), att.option("soft_cap")),
            ("s_aux", options.get("s_aux") is not None or None, att.sink or None),
        ):
            if value != own:
                who = f"{type(module).__name__} {module.layer_idx}"
                raise UnsupportedError(f"{who} wants {name} = {value}, but its spec has {own}")


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kvgen_pages: StepPages | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. ``key`` and ``value`` are already with ``kvgen_pages``."""
    if kvgen_pages is None:
        raise ArgumentError(OUTSIDE)
    kvgen_pages.check(module, options)
    return kvgen_pages.attend(module, query, scaling, options.get("s_aux")), None


def no_mask(*sizes: Any, attention_mask: Tensor | None = None, **options: Any) -> None:
    """transformers' mask interface: lengths are in the step, so there is no mask, and none may be given."""
    if attention_mask is not None:
        raise ArgumentError(OUTSIDE)


@functools.cache
def register() -> None:
    """Make ``attn_implementation="kvgen"`` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)


@functools.cache
def layer_class() -> Any:
    """The cache layer, made late because its base is transformers'."""
    from transformers.cache_utils import CacheLayerMixin

    class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
        """One layer of a transformers Cache whose rows lie in kvgen's pages."""

        def __init__(self, pages: StepPages, layer: int) -> None:
            super().__init__()
            self.pages = pages
            self.layer = layer

        def lazy_initialization(self, *states: Tensor) -> None:
            """Nothing to make: the pages exist."""

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
            """Hand K and V over; the attention function finds the pages, not these tensors."""
            return self.pages.receive(self.layer, key_states, value_states)

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return query_length, 0

        def get_seq_length(self) -> int:
            """0: a packed row has no common past, and every position is given."""
            return 0

        def get_max_length(self) -> int:
            return -1

        def get_max_cache_shape(self) -> int:
            """The same question in transformers before 5.24."""
            return -1

    return PagedLayer


class TransformersModel:
    """A causal language model of transformers as the engine's ``Model``."""

    def __init__(self, module: Any, shape: ModelShape) -> None:
        self.module = module
        self.shape = shape
        self.num_layers = len(shape.layers)
        self.vocab_size = shape.vocab_size
        self.max_positions = shape.max_positions
        # transformers 5.24 renamed past_key_values.
        names = inspect.signature(type(module).forward).parameters
        self._cache_keyword = "cache" if "cache" in names else "past_key_values"

    def forward(self, step: Step, layers: Sequence[Layer]) -> Tensor:
        """Logits (S, vocab_size) f32 of the rows ``step.last_rows_S``; K and V of all rows are appended."""
        import torch
        from transformers.cache_utils import Cache

        pages = StepPages(step, layers)
        layer = layer_class()
        held = Cache(layers=[layer(pages, i) for i in range(self.num_layers)])
        with torch.inference_mode():
            answer = self.module(
                input_ids=step.tokens_T[None],
                position_ids=step.positions_T[None],
                use_cache=True,
                logits_to_keep=step.last_rows_S,
                kvgen_pages=pages,
                **{self._cache_keyword: held},
            )
        return answer.logits[0].float()
