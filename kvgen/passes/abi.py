"""The ABI: the arguments of each op, the same on every backend, in one place.

Shapes use the field's suffixes: T tokens or query rows of all requests, B requests, H heads,
D elements, P table columns, N states. Strides are in elements (bytes, where a byte holds several
codes). A pointer may be null only where
the text says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvgen.errors import UnsupportedError
from kvgen.ir import PageRecord, Param, Spec
from kvgen.ir.plan import OPS, Arg
from kvgen.passes.terms import prefix_obstacle

FLOATS = ("bf16", "f16", "f32")
"""Element types outside the cache."""

ROPE_TABLE = Param("rope_table", ("kv", "d"), "f32")
"""Cosines, then sines, of the angles of each position."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "append": FLOATS,
    "decode": ("single", "multi"),
    "prefill": ("",),
    "merge": FLOATS,
    "copy": ("",),
    "gather": FLOATS,
}
"""What tells the kernels of one op apart: the type of append's input, of gather's output and of merge's
states; for decode, one query a request or several."""

PREFIX = "prefix"
"""A further variant of decode and prefill, where a spec has it: all queries of a cascade over the prefix that
they share."""


def check_variant(op: str, variant: str, spec: Spec) -> str:
    """``variant``, or the default of ``op`` where it is empty (``single``, or the query's type).

    Raises ``UnsupportedError`` for an op or variant that does not exist.
    """
    if op not in OPS:
        raise UnsupportedError(f"op = {op!r}: the ops are {', '.join(OPS)}")
    known = VARIANTS[op]
    if op in ("decode", "prefill") and variant == PREFIX:
        if reason := prefix_obstacle(spec):
            raise UnsupportedError(reason)
        return variant
    chosen = variant or (spec.attention.q_dtype if known == FLOATS else known[0])
    if chosen not in known:
        names = ", ".join(filter(None, known)) or "no variants"
        raise UnsupportedError(f"{op} has no variant {variant!r}; it has {names}")
    return chosen


def variants_of(op: str, spec: Spec) -> tuple[str, ...]:
    """``VARIANTS`` of ``op``, and ``prefix`` where the spec's masks and scores allow a cascade."""
    if op not in ("decode", "prefill") or prefix_obstacle(spec):
        return VARIANTS[op]
    return (*VARIANTS[op], PREFIX)


def op_args(op: str, spec: Spec, record: PageRecord, variant: str) -> tuple[Arg, ...]:
    """Arguments of ``op`` in ABI order. ``variant`` is the element type of append's input, gather's
    output and merge's partial outputs; for decode it is ``single`` (one query a request) or ``multi``.
    """
    return _BUILDERS[op](spec, record, variant)


def plane_args(spec: Spec, record: PageRecord) -> tuple[Arg, ...]:
    """Pointers and run-time strides of every plane; then what lies outside the pages: scales that are given,
    the mean of K, and raw rows."""
    args: list[Arg] = []
    for plane in record.planes:
        args.append(Arg(plane.name, "ptr", plane.dtype, f"{plane.name} plane"))
        for placed in (plane.page, *plane.outside):
            args.append(Arg(f"{plane.name}_stride_{placed.axis.key}", "i64", doc=plane.unit))
    for name, dtype, per_head in spec.given_scales():
        args.append(Arg(name, "ptr", dtype, "one scale per KV head" if per_head else "one scale"))
    if spec.cache.k.mean:
        args.append(Arg("k_mean", "ptr", "f32", "mean of K that was subtracted, kv_heads x head_dim"))
    for plane in record.raw:
        args.append(Arg(plane.name, "ptr", plane.dtype, f"{plane.name} plane: tokens left unquantised"))
        args.append(Arg(f"{plane.name}_stride_page", "i64", doc="elements from one raw row to the next"))
    if record.raw:
        args.append(Arg("raw_rows", "ptr", "i32", "raw row of each page, -1 for none"))
    return tuple(args)


def _ptr(name: str, dtype: str, doc: str) -> Arg:
    return Arg(name, "ptr", dtype, doc)


def _int(*names: str, doc: str = "") -> tuple[Arg, ...]:
    return tuple(Arg(name, "i64", doc=doc) for name in names)


_THREADS = Arg("num_threads", "i64", doc="CPU threads to use")


def attention_params(spec: Spec, *, sink: bool = True) -> tuple[Param, ...]:
    """What decode and prefill read beside the cache: masks, scores, the sink, and angles where K is rotated
    when it is read. ``sink``: whether the kernel ends a state."""
    att = spec.attention
    rope = (ROPE_TABLE,) if att.rope and att.rope.stored == "pre" else ()
    return tuple(p for p in att.params if sink or p.name != "sink_logit") + rope


def param_args(params: Iterable[Param]) -> tuple[Arg, ...]:
    """A pointer to each parameter, and strides of all its dimensions but the last, which is contiguous."""
    args: list[Arg] = []
    for param in params:
        dtype = "u8" if param.dtype in ("bool", "bits") else param.dtype
        bits = ", eight a byte" if param.dtype == "bits" else ""
        args.append(_ptr(f"param_{param.name}", dtype, " x ".join(param.dims) + bits))
        args += _int(*(f"param_{param.name}_stride_{dim}" for dim in param.dims[:-1]), doc="elements")
    return tuple(args)


def _attention(spec: Spec, record: PageRecord, *, ragged: bool, sink: bool = True) -> tuple[Arg, ...]:
    dtype = spec.attention.q_dtype
    starts = (_ptr("q_starts", "i32", "first query row of each request, B+1"),) if ragged else ()
    return (
        _ptr("q", dtype, "queries, T x q_heads x head_dim"),
        *_int("q_stride_tok", "q_stride_head", doc="elements"),
        *starts,
        *plane_args(spec, record),
        _ptr("page_table", "i32", "page ids, B x P"),
        *_int("table_stride", doc="elements from one request's row to the next"),
        _ptr("kv_lens", "i32", "keys of each request, B"),
        *param_args(attention_params(spec, sink=sink)),
        _ptr("out", dtype, "outputs, T x q_heads x v_head_dim"),
        *_int("out_stride_tok", "out_stride_head", doc="elements"),
        _ptr("lse", "f32", "base-2 logsumexp, T x q_heads"),
        *_int("lse_stride_tok", doc="elements"),
        *_int("batch", doc="requests"),
        *_int("max_q_len", doc="longest query of a request"),
        *_int("table_width", doc="columns P of the page table"),
        Arg("score_scale", "f64", doc="attention scale times log2(e)"),
        _ptr("workspace", "u8", "scratch; see the workspace query"),
        _THREADS,
    )


def _append(spec: Spec, record: PageRecord, variant: str) -> tuple[Arg, ...]:
    values = (
        ()
        if spec.cache.alias
        else (
            _ptr("v_new", variant, "new values, T x kv_heads x v_head_dim"),
            *_int("v_new_stride_tok", "v_new_stride_head", doc="elements"),
        )
    )
    rope = spec.attention.rope
    turns = rope is not None and rope.stored == "post"
    rows = (
        _ptr("k_new", variant, "new keys, T x kv_heads x head_dim"),
        *_int("k_new_stride_tok", "k_new_stride_head", doc="elements"),
        *values,
    )
    table = param_args((ROPE_TABLE,)) if turns else ()
    if spec.cache.raw is not None:
        return (
            *rows,
            _ptr("q_starts", "i32", "first new row of each request, B+1"),
            _ptr("page_table", "i32", "page ids, B x P"),
            *_int("table_stride", doc="elements from one request's row to the next"),
            _ptr("kv_lens", "i32", "tokens of each request after this append, B"),
            *table,
            *_int("batch", doc="requests"),
            *_int("max_new_len", doc="most new tokens of a request"),
            *_int("table_width", doc="columns P of the page table"),
            *plane_args(spec, record),
            _THREADS,
        )
    turned = (_ptr("positions", "i32", "position of each token, T"), *table)
    return (
        *rows,
        _ptr("slots", "i64", "page * page_size + offset, T; -1 skips the token"),
        *(turned if turns else ()),
        *_int("num_tokens", doc="tokens T"),
        *plane_args(spec, record),
        _THREADS,
    )


def _merge(spec: Spec, record: PageRecord, variant: str) -> tuple[Arg, ...]:
    return (
        _ptr("outs", variant, "partial outputs, N x T x q_heads x v_head_dim"),
        *_int("outs_stride_state", "outs_stride_tok", "outs_stride_head", doc="elements"),
        _ptr("lses", "f32", "their base-2 logsumexp, N x T x q_heads"),
        *_int("lses_stride_state", "lses_stride_tok", doc="elements"),
        *param_args(p for p in spec.attention.params if p.name == "sink_logit"),
        _ptr("out", variant, "merged output, T x q_heads x v_head_dim"),
        *_int("out_stride_tok", "out_stride_head", doc="elements"),
        _ptr("lse", "f32", "merged logsumexp, T x q_heads"),
        *_int("lse_stride_tok", doc="elements"),
        *_int("num_states", doc="states N"),
        *_int("num_tokens", doc="rows T"),
        _THREADS,
    )


def _copy(spec: Spec, record: PageRecord, variant: str) -> tuple[Arg, ...]:
    stored = {plane.name for plane in record.planes}
    planes = tuple(a for a in plane_args(spec, record) if a.name.split("_stride_")[0] in stored)
    return (
        *planes,
        _ptr("src_pages", "i32", "pages to read, N"),
        _ptr("dst_pages", "i32", "pages to write, N"),
        *_int("num_pairs", doc="pairs N"),
        _THREADS,
    )


def _gather(spec: Spec, record: PageRecord, variant: str) -> tuple[Arg, ...]:
    values = (
        ()
        if spec.cache.alias
        else (
            _ptr("v_out", variant, "values, T x kv_heads x v_head_dim"),
            *_int("v_out_stride_tok", "v_out_stride_head", doc="elements"),
        )
    )
    return (
        *plane_args(spec, record),
        _ptr("page_table", "i32", "page ids, B x P"),
        *_int("table_stride", doc="elements from one request's row to the next"),
        _ptr("kv_lens", "i32", "keys of each request, B"),
        _ptr("kv_starts", "i64", "first output row of each request, B"),
        _ptr("k_out", variant, "keys, T x kv_heads x head_dim"),
        *_int("k_out_stride_tok", "k_out_stride_head", doc="elements"),
        *values,
        *_int("batch", doc="requests"),
        *_int("max_kv_len", doc="longest request, or the table's capacity"),
        _THREADS,
    )


_BUILDERS = {
    "append": _append,
    "decode": lambda spec, record, variant: _attention(
        spec, record, ragged=variant != "single", sink=variant != PREFIX
    ),
    "prefill": lambda spec, record, variant: _attention(spec, record, ragged=True, sink=variant != PREFIX),
    "merge": _merge,
    "copy": _copy,
    "gather": _gather,
}
