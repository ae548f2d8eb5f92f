// kvgen append (f32) for cpu-portable
// spec bc9b7145: page kv head tok d, page 4, K int8, V int8
// schedule: parallel_rows=256
//
// Writes new keys and values into their slots, quantised as they go.
// An append changes the bytes of its slots and of their scales, and no other byte.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvgen_append_a79c2a37_impl {

constexpr int KV_HEADS = 2;
constexpr int HEAD_DIM = 16;
constexpr int V_HEAD_DIM = 16;
constexpr int PAGE = 4;  // tokens in a page
constexpr int PARALLEL_ROWS = 256;  // rows from which threads pay
constexpr float SMALLEST_AMAX = 7.888609052210118e-31;  // a block below this is zero
constexpr int K_STRIDE_HEAD = 64;  // elements from one head index to the next
constexpr int K_STRIDE_TOK = 16;  // elements from one tok index to the next
constexpr int K_SCALE_STRIDE_HEAD = 4;  // elements from one head index to the next
constexpr int V_STRIDE_HEAD = 64;  // elements from one head index to the next
constexpr int V_STRIDE_TOK = 16;  // elements from one tok index to the next
constexpr int V_SCALE_STRIDE_HEAD = 4;  // elements from one head index to the next

struct Args {
  float* k_new;  // new keys, T x kv_heads x head_dim
  int64_t k_new_stride_tok;  // elements
  int64_t k_new_stride_head;  // elements
  float* v_new;  // new values, T x kv_heads x v_head_dim
  int64_t v_new_stride_tok;  // elements
  int64_t v_new_stride_head;  // elements
  int64_t* slots;  // page * page_size + offset, T; -1 skips the token
  int64_t num_tokens;  // tokens T
  int8_t* k;  // k plane
  int64_t k_stride_page;  // elements
  float* k_scale;  // k_scale plane
  int64_t k_scale_stride_page;  // elements
  int8_t* v;  // v plane
  int64_t v_stride_page;  // elements
  float* v_scale;  // v_scale plane
  int64_t v_scale_stride_page;  // elements
  int64_t num_threads;  // CPU threads to use
};


// The scale of N elements and its inverse. Where one of them is inf or NaN the scale is NaN, where all are as good as
// zero it is zero; `inv` is zero in both cases, and so must be the codes.
template <int N, int QMAX>
inline float find_scale(const float* x, float& inv) {
  // The largest magnitude, compared as bits: inf and NaN come out on top.
  uint32_t amax_bits = 0;
  for (int d = 0; d < N; ++d) {
    uint32_t bits;
    std::memcpy(&bits, x + d, sizeof bits);
    amax_bits = std::max(amax_bits, bits & 0x7fffffff);
  }
  float amax;
  std::memcpy(&amax, &amax_bits, sizeof amax);
  inv = 0.0f;
  if (amax_bits >= 0x7f800000) return NAN;
  if (amax < SMALLEST_AMAX) return 0.0f;
  const float scale = amax / QMAX;
  inv = 1.0f / scale;
  return scale;
}

// Rounded to nearest even (adding 1.5 * 2^23 leaves no fraction bits) and saturated to -LIMIT .. LIMIT; NaN becomes 0.
template <int LIMIT>
inline int8_t to_integer(float x) {
  const float limited = x > LIMIT ? LIMIT : x < -LIMIT ? -LIMIT : x;
  const float rounded = (limited + 12582912.0f) - 12582912.0f;
  return rounded == rounded ? (int8_t)rounded : 0;
}

template <int N>
inline void round_int8(const float* x, float inv, int8_t* codes) {
  for (int d = 0; d < N; ++d) codes[d] = to_integer<127>(x[d] * inv);
}


// The stored elements of one row of K, and its scale in its place.
inline void encode_k(const Args& a, int64_t page, int64_t tok, int64_t head, const float* x, int8_t* row) {
  float inv;
  a.k_scale[page * a.k_scale_stride_page + head * K_SCALE_STRIDE_HEAD + tok] = find_scale<HEAD_DIM, 127>(x, inv);
  if (inv == 0.0f)
    std::memset(row, 0, HEAD_DIM);
  else
    round_int8<HEAD_DIM>(x, inv, row);
}

// Writes one row of K into its slot.
inline void store_k(const Args& a, int64_t page, int64_t tok, int64_t head, const float* x) {
  int8_t* row = a.k + page * a.k_stride_page + head * K_STRIDE_HEAD + tok * K_STRIDE_TOK;
  encode_k(a, page, tok, head, x, row);
}

// The stored elements of one row of V, and its scale in its place.
inline void encode_v(const Args& a, int64_t page, int64_t tok, int64_t head, const float* x, int8_t* row) {
  float inv;
  a.v_scale[page * a.v_scale_stride_page + head * V_SCALE_STRIDE_HEAD + tok] = find_scale<V_HEAD_DIM, 127>(x, inv);
  if (inv == 0.0f)
    std::memset(row, 0, V_HEAD_DIM);
  else
    round_int8<V_HEAD_DIM>(x, inv, row);
}

// Writes one row of V into its slot.
inline void store_v(const Args& a, int64_t page, int64_t tok, int64_t head, const float* x) {
  int8_t* row = a.v + page * a.v_stride_page + head * V_STRIDE_HEAD + tok * V_STRIDE_TOK;
  encode_v(a, page, tok, head, x, row);
}

int run(const Args& a) {
#pragma omp parallel for num_threads((int)a.num_threads) schedule(static) if (a.num_tokens * KV_HEADS >= PARALLEL_ROWS)
  for (int64_t token = 0; token < a.num_tokens; ++token) {
    const int64_t slot = a.slots[token];
    if (slot < 0) continue;
    const int64_t page = slot / PAGE, tok = slot % PAGE;
    for (int64_t head = 0; head < KV_HEADS; ++head) {
      store_k(a, page, tok, head, a.k_new + token * a.k_new_stride_tok + head * a.k_new_stride_head);
      store_v(a, page, tok, head, a.v_new + token * a.v_new_stride_tok + head * a.v_new_stride_head);
    }
  }
  return 0;
}

// Whether slots break the rule that `kvgen.ir.rules` gives the number 4; 0 where they do not.
inline int64_t broken_rule(const Args& a, int64_t num_pages) {
  for (int64_t t = 0; t < a.num_tokens; ++t)
    if (a.slots[t] < -1 || a.slots[t] >= num_pages * PAGE) return 4;
  if (a.num_tokens <= 32) {  // the tokens of a decode step: comparing each with each is quicker than to sort
    for (int64_t t = 1; t < a.num_tokens; ++t)
      if (a.slots[t] >= 0 && std::find(a.slots, a.slots + t, a.slots[t]) != a.slots + t) return 4;
    return 0;
  }
  std::vector<int64_t> sorted(a.slots, a.slots + a.num_tokens);
  std::sort(sorted.begin(), sorted.end());
  const auto real = std::lower_bound(sorted.begin(), sorted.end(), 0);
  return std::adjacent_find(real, sorted.end()) == sorted.end() ? 0 : 4;
}

}  // namespace kvgen_append_a79c2a37_impl

// Before a launch: the bytes of workspace that it needs, or minus the number of the rule that its values break.
// They are looked at where `num_pages` is not negative; `rows` is the number of query rows.
extern "C" int64_t kvgen_append_a79c2a37_query(const void* args, int64_t num_pages, int64_t /*rows*/) {
  using namespace kvgen_append_a79c2a37_impl;
  const Args& a = *static_cast<const Args*>(args);
  if (num_pages >= 0)
    if (const int64_t rule = broken_rule(a, num_pages)) return -rule;
  return 0;
}

extern "C" int kvgen_append_a79c2a37(const void* args) {
  return kvgen_append_a79c2a37_impl::run(*static_cast<const kvgen_append_a79c2a37_impl::Args*>(args));
}
