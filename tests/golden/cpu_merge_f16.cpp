// kvgen merge (f16) for cpu-portable
// spec 1cd0add7: kv page tok head d, page 5, K f16, V int8
// schedule: nothing to choose
//
// Merges attention states (out, lse) of the same queries over disjoint keys. An empty state (lse = -inf) adds nothing;
// no states, or only empty ones, give (0, -inf). `out` may be one of the inputs: a row is read whole before it is written.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvgen_merge_873af9f9_impl {

constexpr int Q_HEADS = 6;
constexpr int V_HEAD_DIM = 72;

struct Args {
  uint16_t* outs;  // partial outputs, N x T x q_heads x v_head_dim
  int64_t outs_stride_state;  // elements
  int64_t outs_stride_tok;  // elements
  int64_t outs_stride_head;  // elements
  float* lses;  // their base-2 logsumexp, N x T x q_heads
  int64_t lses_stride_state;  // elements
  int64_t lses_stride_tok;  // elements
  uint16_t* out;  // merged output, T x q_heads x v_head_dim
  int64_t out_stride_tok;  // elements
  int64_t out_stride_head;  // elements
  float* lse;  // merged logsumexp, T x q_heads
  int64_t lse_stride_tok;  // elements
  int64_t num_states;  // states N
  int64_t num_tokens;  // rows T
  int64_t num_threads;  // CPU threads to use
};


inline float f16_to_f32(uint16_t x) {
  // Shift exponent and mantissa into place, then undo the difference of the biases by a multiplication that is
  // exact for normal and subnormal numbers alike; inf and NaN get their exponent back by hand.
  const uint32_t magnitude = (uint32_t)(x & 0x7fff) << 13, sign = (uint32_t)(x & 0x8000) << 16;
  float y;
  std::memcpy(&y, &magnitude, sizeof y);
  y *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  if ((x & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= sign;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline uint16_t f32_to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) {
    // Subnormal in f16: adding 0.5 leaves the rounded value in the low bits.
    float y;
    std::memcpy(&y, &bits, sizeof y);
    y += 0.5f;
    std::memcpy(&bits, &y, sizeof bits);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1);
  return sign | (uint16_t)((bits - 0x38000000) >> 13);
}

// An infinity of V lasts until its weight vanishes, and is NaN from there on: all of them end as NaN.
inline float no_infinity(float x) { return x - x == 0.0f ? x : NAN; }


inline void merge_row(const Args& a, int64_t token, int64_t head) {
  const auto lse_of = [&](int64_t n) { return a.lses[n * a.lses_stride_state + token * a.lses_stride_tok + head]; };
  float top = -INFINITY;
  for (int64_t n = 0; n < a.num_states; ++n) top = std::max(top, lse_of(n));
  float row[V_HEAD_DIM] = {}, sum = 0;
  for (int64_t n = 0; n < a.num_states; ++n) {
    const float lse = lse_of(n);
    // Skipped, not weighted by zero: the rows of an empty state may hold anything.
    if (lse == -INFINITY) continue;
    const float weight = std::exp2(lse - top);
    const uint16_t* out = a.outs + n * a.outs_stride_state + token * a.outs_stride_tok + head * a.outs_stride_head;
    sum += weight;
    for (int d = 0; d < V_HEAD_DIM; ++d) row[d] += weight * f16_to_f32(out[d]);
  }
  uint16_t* target = a.out + token * a.out_stride_tok + head * a.out_stride_head;
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int d = 0; d < V_HEAD_DIM; ++d) target[d] = f32_to_f16(no_infinity(row[d] * factor));
  a.lse[token * a.lse_stride_tok + head] = sum == 0.0f ? -INFINITY : top + std::log2(sum);
}

int run(const Args& a) {
#pragma omp parallel for num_threads((int)a.num_threads) schedule(static) collapse(2)
  for (int64_t token = 0; token < a.num_tokens; ++token)
    for (int64_t head = 0; head < Q_HEADS; ++head) merge_row(a, token, head);
  return 0;
}

}  // namespace kvgen_merge_873af9f9_impl

extern "C" int kvgen_merge_873af9f9(const void* args) {
  return kvgen_merge_873af9f9_impl::run(*static_cast<const kvgen_merge_873af9f9_impl::Args*>(args));
}
