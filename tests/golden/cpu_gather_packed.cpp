// kvgen gather (f32) for cpu-portable
// spec 1ade912c: page kv head tok d, page 64, K bf16 as 'head d/8 tok d%8', V f32
// schedule: nothing to choose
//
// Copies the keys and values of each request from its pages to contiguous rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvgen_gather_f779d7fd_impl {

constexpr int KV_HEADS = 4;
constexpr int HEAD_DIM = 96;
constexpr int V_HEAD_DIM = 96;
constexpr int PAGE = 64;  // tokens in a page
constexpr int K_STRIDE_HEAD = 6144;  // elements from one head to the next
constexpr int K_STRIDE_D_OUTER = 512;  // elements from one block of 8 elements of d to the next
constexpr int K_STRIDE_TOK = 8;  // elements from one token to the next
constexpr int V_STRIDE_HEAD = 6144;  // elements from one head to the next
constexpr int V_STRIDE_TOK = 96;  // elements from one token to the next

struct Args {
  uint16_t* k;  // k plane
  int64_t k_stride_page;  // elements
  float* v;  // v plane
  int64_t v_stride_page;  // elements
  int32_t* page_table;  // page ids, B x P
  int64_t table_stride;  // elements from one request's row to the next
  int32_t* kv_lens;  // keys of each request, B
  int64_t* kv_starts;  // first output row of each request, B
  float* k_out;  // keys, T x kv_heads x head_dim
  int64_t k_out_stride_tok;  // elements
  int64_t k_out_stride_head;  // elements
  float* v_out;  // values, T x kv_heads x v_head_dim
  int64_t v_out_stride_tok;  // elements
  int64_t v_out_stride_head;  // elements
  int64_t batch;  // requests
  int64_t max_kv_len;  // longest request, or the table's capacity
  int64_t num_threads;  // CPU threads to use
};


inline float bf16_to_f32(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}


// Reads one row of K.
inline void load_k(const Args& a, int64_t page, int64_t tok, int64_t head, float* out) {
  const uint16_t* row = a.k + page * a.k_stride_page + head * K_STRIDE_HEAD + tok * K_STRIDE_TOK;
  uint16_t stored[HEAD_DIM];
  for (int d = 0; d < HEAD_DIM; d += 8)
    std::memcpy(stored + d, row + (d / 8) * K_STRIDE_D_OUTER + (d % 8), 8 * sizeof(uint16_t));
  for (int d = 0; d < HEAD_DIM; ++d) out[d] = bf16_to_f32(stored[d]);
}

// Reads one row of V.
inline void load_v(const Args& a, int64_t page, int64_t tok, int64_t head, float* out) {
  const float* row = a.v + page * a.v_stride_page + head * V_STRIDE_HEAD + tok * V_STRIDE_TOK;
  std::memcpy(out, row, V_HEAD_DIM * sizeof *row);
}

int run(const Args& a) {
#pragma omp parallel for num_threads((int)a.num_threads) schedule(dynamic, 64) collapse(2)
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t key = 0; key < a.max_kv_len; ++key) {
      if (key >= a.kv_lens[b]) continue;
      const int64_t page = a.page_table[b * a.table_stride + key / PAGE], tok = key % PAGE;
      const int64_t row = a.kv_starts[b] + key;
      for (int64_t head = 0; head < KV_HEADS; ++head) {
        load_k(a, page, tok, head, a.k_out + row * a.k_out_stride_tok + head * a.k_out_stride_head);
        load_v(a, page, tok, head, a.v_out + row * a.v_out_stride_tok + head * a.v_out_stride_head);
      }
    }
  }
  return 0;
}

}  // namespace kvgen_gather_f779d7fd_impl

extern "C" int kvgen_gather_f779d7fd(const void* args) {
  return kvgen_gather_f779d7fd_impl::run(*static_cast<const kvgen_gather_f779d7fd_impl::Args*>(args));
}
