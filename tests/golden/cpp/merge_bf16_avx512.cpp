// kvgen merge (bf16) for cpu-avx512 +bf16 +vnni
// spec dd71d05d: page kv head tok d, page 16, K bf16, V bf16
// schedule: nothing to choose
//
// Merges attention states (out, lse) of the same queries over disjoint keys. An empty state (lse = -inf) adds nothing;
// no states, or only empty ones, give (0, -inf). `out` may be one of the inputs: a row is read whole before it is written.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace kvgen_merge_59cb7a16_impl {

constexpr int Q_HEADS = 32;
constexpr int V_HEAD_DIM = 128;

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


inline float bf16_to_f32(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
// Round to nearest even; a NaN stays one.
inline uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t nan = (uint16_t)(bits >> 16 | 0x40);
  return (bits & 0x7fffffff) > 0x7f800000 ? nan : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}


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
    for (int d = 0; d < V_HEAD_DIM; ++d) row[d] += weight * bf16_to_f32(out[d]);
  }
  uint16_t* target = a.out + token * a.out_stride_tok + head * a.out_stride_head;
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int d = 0; d < V_HEAD_DIM; ++d) target[d] = f32_to_bf16(row[d] * factor);
  a.lse[token * a.lse_stride_tok + head] = sum == 0.0f ? -INFINITY : top + std::log2(sum);
}

int run(const Args& a) {
#pragma omp parallel for num_threads((int)a.num_threads) schedule(static) collapse(2)
  for (int64_t token = 0; token < a.num_tokens; ++token)
    for (int64_t head = 0; head < Q_HEADS; ++head) merge_row(a, token, head);
  return 0;
}

}  // namespace kvgen_merge_59cb7a16_impl

extern "C" int kvgen_merge_59cb7a16(const void* args) {
  return kvgen_merge_59cb7a16_impl::run(*static_cast<const kvgen_merge_59cb7a16_impl::Args*>(args));
}
