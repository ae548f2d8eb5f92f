"""The intermediate representation: frozen values that say *what*, never *how*.

Grammar (nouns only; the verbs that turn one into the next live in ``kvgen.passes``)::

    Spec          := name AttentionSpec CacheSpec
    AttentionSpec := q_heads kv_heads head_dim v_head_dim q_dtype scale causal window qk pv
                     (key value)* Param* [RopeSpec]               masks, score terms and sinks by key
    Param         := name dim* dtype                              dim in batch head q kv
    RopeSpec      := kind pairing dim theta stored (key value)*
    CacheSpec     := page_size align LayoutSpec k:QuantSpec (v:QuantSpec | alias) keep_first keep_last
    QuantSpec     := Codec group scale_dtype scales [LayoutSpec] [affine] [outer] [transform] [mean]
                     | (size QuantSpec)*                          segments along d
    Codec         := kind bits facts                              registered
    RawSpec       := keep_first keep_last block page_size         tokens that are no codes (yet)
    LayoutSpec    := Axis+                                        outermost first
    Axis          := dim | dim "/" block | dim "%" block          dim in page kv head tok d
    PageRecord    := Plane+                                       where each element lies
    Plane         := name dtype (Axis extent stride)+ offset
    Schedule      := (knob value)*                                how, never what
    Target        := backend arch facts
    KernelPlan    := op Spec Schedule Target arguments constants  nothing left to decide

Logical dimensions have fixed names everywhere: ``page`` (a physical page), ``head`` (a KV
head), ``tok`` (a token within its page), ``d`` (an element of a head), ``kv`` (K or V).
"""

from kvgen.ir.attention import AttentionSpec, Param
from kvgen.ir.cache import CacheSpec
from kvgen.ir.codec import CODECS, Codec
from kvgen.ir.layout import Axis, LayoutError, LayoutSpec
from kvgen.ir.quant import FORMATS, Format, QuantSpec, Segment
from kvgen.ir.raw import RawSpec
from kvgen.ir.record import Extent, PageRecord, Plane
from kvgen.ir.rope import RopeSpec
from kvgen.ir.schedule import Schedule
from kvgen.ir.spec import Spec
from kvgen.ir.target import Target

__all__ = [
    "CODECS",
    "FORMATS",
    "AttentionSpec",
    "Axis",
    "CacheSpec",
    "Codec",
    "Extent",
    "Format",
    "LayoutError",
    "LayoutSpec",
    "PageRecord",
    "Param",
    "Plane",
    "QuantSpec",
    "RawSpec",
    "RopeSpec",
    "Schedule",
    "Segment",
    "Spec",
    "Target",
]
