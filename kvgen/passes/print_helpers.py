"""Functions that printed expressions call, in both languages: only those in use are put into a source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Helper:
    """A function that printed texts may call, in both languages."""

    cpp: str
    triton: str


HELPERS = {
    "tanh_": Helper(
        """\
// tanh(x), within 2e-7 of it: a small x loses relative, not absolute, precision. No x overflows it.
inline float tanh_(float x) { return 1.0f - 2.0f / (1.0f + std::exp2(2.8853901f * x)); }""",
        '''\
@triton.jit
def tanh_(x):
    """tanh(x), within 2e-7 of it: a small x loses relative, not absolute, precision. No x overflows it."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(2.8853900817779268 * x))''',
    ),
    "sigmoid_": Helper(
        """\
// 1 / (1 + exp(-x)). No x overflows it.
inline float sigmoid_(float x) { return 1.0f / (1.0f + std::exp2(-1.442695f * x)); }""",
        '''\
@triton.jit
def sigmoid_(x):
    """1 / (1 + exp(-x)). No x overflows it."""
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))''',
    ),
    "floor_div": Helper(
        """\
// a / b rounded down, for b >= 1.
inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }""",
        '''\
@triton.jit
def floor_div(a, b):
    """a / b rounded down, for b >= 1 (Triton's // truncates)."""
    return tl.where(a < 0, -((b - 1 - a) // b), a // b)''',
    ),
    "floor_mod": Helper(
        """\
// The remainder of a by b, from 0 to b - 1, for b >= 1.
inline int64_t floor_mod(int64_t a, int64_t b) { return a % b + (a % b < 0 ? b : 0); }""",
        '''\
@triton.jit
def floor_mod(a, b):
    """The remainder of a by b, from 0 to b - 1, for b >= 1 (Triton's % has the sign of a)."""
    return tl.where(a % b < 0, a % b + b, a % b)''',
    ),
    "any_div": Helper(
        """\
// a / b rounded down, for any b; 0 where b is 0.
inline int64_t any_div(int64_t a, int64_t b) {
    if (b == -1) return int64_t(-uint64_t(a));  // the smallest a has no counterpart: dividing it would trap
    return b == 0 ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0));
}""",
        '''\
@triton.jit
def any_div(a, b):
    """a / b rounded down, for any b; 0 where b is 0 (Triton's // truncates)."""
    by = tl.where(b == 0, 1, b)
    down = a // by - ((a % by != 0) & ((a < 0) != (by < 0))).to(tl.int32)
    return tl.where(b == 0, 0, down)''',
    ),
    "any_mod": Helper(
        """\
// The remainder of a by b, with the sign of b, for any b; 0 where b is 0.
inline int64_t any_mod(int64_t a, int64_t b) {
    if (b == -1) return 0;  // the smallest a would trap
    return b == 0 ? 0 : a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
}""",
        '''\
@triton.jit
def any_mod(a, b):
    """The remainder of a by b, with the sign of b, for any b; 0 where b is 0."""
    by = tl.where(b == 0, 1, b)
    rest = a % by
    rest = tl.where((rest != 0) & ((a < 0) != (by < 0)), rest + by, rest)
    return tl.where(b == 0, 0, rest)''',
    ),
    "shift_left": Helper(
        """\
// a << n in 64 bits; 0 where n is not in 0 .. 63.
inline int64_t shift_left(int64_t a, int64_t n) {
    return uint64_t(n) < 64 ? int64_t(uint64_t(a) << n) : 0;
}""",
        '''\
@triton.jit
def shift_left(a, n):
    """a << n in 64 bits; 0 where n is not in 0 .. 63."""
    inside = (n >= 0) & (n < 64)
    return tl.where(inside, tl.cast(a, tl.int64) << tl.where(inside, n, 0), 0)''',
    ),
    "shift_right": Helper(
        """\
// a >> n; the sign of a where n is not in 0 .. 63.
inline int64_t shift_right(int64_t a, int64_t n) { return a >> (uint64_t(n) < 64 ? n : 63); }""",
        '''\
@triton.jit
def shift_right(a, n):
    """a >> n in 64 bits; the sign of a where n is not in 0 .. 63."""
    return tl.cast(a, tl.int64) >> tl.where((n >= 0) & (n < 64), n, 63)''',
    ),
}
"""Definitions by name. C++ needs ``<cmath>`` and ``<cstdint>``, Triton ``triton`` and ``tl``."""
