// kvgen prefill for cpu-avx512
// spec 1cd0add7: kv page tok head d, page 5, K f16, V int8
// schedule: prefetch=0 q_tile=32 row_block=4 tile=64
//
// Attention of the queries of a ragged batch over each request's pages. A unit is (request, 32 queries, one KV head);
// tiles of keys lie on multiples of TILE, so that a row's bits do not depend on how its request was cut into chunks,
// but for the rounding of its first tile, which begins at the window's edge of the block's first query.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <immintrin.h>

namespace kvgen_prefill_3703c9ec_impl {

constexpr int KV_HEADS = 2;
constexpr int HEAD_DIM = 72;
constexpr int V_HEAD_DIM = 72;
constexpr int PAGE = 5;  // tokens in a page
constexpr int GROUP = 3;  // query heads that share a KV head
constexpr int TILE = 60;  // keys between two softmax steps
constexpr int TILE_PAD = 64;  // their scores, in whole vectors
constexpr int HEADS = 1;  // KV heads of a unit of work
constexpr int Q_TILE = 32;  // queries of a unit of work
constexpr int ROWS_PAD = 96;  // its query rows, in whole blocks
constexpr int ROW_BLOCK = 4;  // query rows of the inner kernel
constexpr int TOK_BLOCK = 4;  // keys of the inner kernel
constexpr int K_PITCH = 80;  // elements of a prepared query row
constexpr int V_PITCH = 80;  // elements of an accumulator row
constexpr int WINDOW = 128;  // earlier keys that a query sees
constexpr int K_STRIDE_TOK = 192;  // elements from one tok index to the next
constexpr int K_STRIDE_HEAD = 96;  // elements from one head index to the next
constexpr int V_STRIDE_TOK = 256;  // elements from one tok index to the next
constexpr int V_STRIDE_HEAD = 128;  // elements from one head index to the next

struct Args {
  uint16_t* q;  // queries, T x q_heads x head_dim
  int64_t q_stride_tok;  // elements
  int64_t q_stride_head;  // elements
  int32_t* q_starts;  // first query row of each request, B+1
  uint16_t* k;  // k plane
  int64_t k_stride_page;  // elements
  int8_t* v;  // v plane
  int64_t v_stride_page;  // elements
  float* v_scale;  // one scale per KV head
  int32_t* page_table;  // page ids, B x P
  int64_t table_stride;  // elements from one request's row to the next
  int32_t* kv_lens;  // keys of each request, B
  uint16_t* out;  // outputs, T x q_heads x v_head_dim
  int64_t out_stride_tok;  // elements
  int64_t out_stride_head;  // elements
  float* lse;  // base-2 logsumexp, T x q_heads
  int64_t lse_stride_tok;  // elements
  int64_t batch;  // requests
  int64_t max_q_len;  // longest query of a request
  int64_t table_width;  // columns P of the page table
  double score_scale;  // attention scale times log2(e)
  char* workspace;  // scratch; see the workspace query
  int64_t num_threads;  // CPU threads to use
};


inline float f16_to_f32(uint16_t x) { return _cvtsh_ss(x); }

inline uint16_t f32_to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

using vf = __m512;
constexpr int LANES = 16;
inline vf splat(float x) { return _mm512_set1_ps(x); }
inline vf load_f32(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

inline vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline vf load_f16_part(const uint16_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((1u << n) - 1, p));
}

inline vf widen_int8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
inline vf load_int8(const int8_t* p) { return widen_int8(_mm_loadu_si128((const __m128i*)p)); }

inline vf load_int8_part(const int8_t* p, int n) { return widen_int8(_mm_maskz_loadu_epi8((1u << n) - 1, p)); }

inline vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
inline float largest(vf x) { return _mm512_reduce_max_ps(x); }
inline float total(vf x) { return _mm512_reduce_add_ps(x); }

// 2^x for x <= 0, relative error 2e-7; exactly 1 at 0, 0 at -inf, NaN at NaN (max returns its second operand there).
inline vf exp2v(vf x) {
  x = _mm512_max_ps(splat(-150.0f), x);
  const vf whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf part = x - whole;
  vf y = splat(1.3264727e-3f);
  y = fma(y, part, splat(9.671513e-3f));
  y = fma(y, part, splat(5.5507336e-2f));
  y = fma(y, part, splat(2.4022242e-1f));
  y = fma(y, part, splat(6.93147e-1f));
  y = fma(y, part, splat(1.0f));
  return _mm512_scalef_ps(y, whole);
}

// Lane i of the result is the sum of the lanes of x[i]: a transposing tree of 15 additions.
inline vf sum_each(const vf (&x)[16]) {
  vf pairs[8], quads[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  // quads[i] holds, in each 128-bit lane, a part of the sums of x[4i .. 4i + 3]: add those lanes up.
  const vf low = _mm512_shuffle_f32x4(quads[0], quads[1], 0x44) + _mm512_shuffle_f32x4(quads[0], quads[1], 0xEE);
  const vf high = _mm512_shuffle_f32x4(quads[2], quads[3], 0x44) + _mm512_shuffle_f32x4(quads[2], quads[3], 0xEE);
  return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xDD);
}


// One unit of work: some heads of one request, a block of query rows, and the state of each row.
struct Unit {
  const int32_t* pages;  // the request's row of the page table
  int64_t position;      // of the first query row's token
  int rows, rows_pad;    // query rows of one KV head, and their number rounded up to ROW_BLOCK
  int head0;             // first KV head
  float* q;              // HEADS x rows_pad x K_PITCH
  float* acc;            // HEADS x rows_pad x V_PITCH
  float *m, *l;          // HEADS x rows_pad
};

// Where the keys of a tile lie, as offsets that all heads share.
struct Tile {
  int64_t k[TILE_PAD], v[TILE_PAD];
};

// The same for one head: rows of K and V, and their scales.
struct Rows {
  const uint16_t* k[TILE_PAD];
  const int8_t* v[TILE_PAD];
};

// Past the last key the last one repeats, so that whole blocks can be computed; their weights are zero.
inline void locate(const Args& a, const int32_t* pages, int64_t first, int count, Tile& tile) {
  for (int i = 0; i < TILE_PAD; ++i) {
    const int64_t key = first + std::min(i, count - 1);
    const int64_t page = pages[key / PAGE], tok = key % PAGE;
    tile.k[i] = page * a.k_stride_page + tok * K_STRIDE_TOK;
    tile.v[i] = page * a.v_stride_page + tok * V_STRIDE_TOK;
  }
}

inline void point(const Args& a, const Tile& tile, int64_t head, Rows& rows) {
  const uint16_t* k_head = a.k + head * K_STRIDE_HEAD;
  const int8_t* v_head = a.v + head * V_STRIDE_HEAD;
  for (int i = 0; i < TILE_PAD; ++i) {
    rows.k[i] = k_head + tile.k[i];
    rows.v[i] = v_head + tile.v[i];
  }
}

// s[r][t] = q_r . k_t for ROW_BLOCK queries and TOK_BLOCK keys. Lanes run along d and are summed at the end.
inline void score_block(const float* q, const uint16_t* const* k_rows, float* s) {
  vf sums[ROW_BLOCK * TOK_BLOCK] = {};
  for (int d = 0; d < 64; d += 16) {
    vf k_T[TOK_BLOCK];
#pragma GCC unroll 16
    for (int t = 0; t < TOK_BLOCK; ++t) k_T[t] = load_f16(k_rows[t] + d);
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) {
      const vf q_r = load_f32(q + r * K_PITCH + d);
#pragma GCC unroll 16
      for (int t = 0; t < TOK_BLOCK; ++t) sums[r * TOK_BLOCK + t] = fma(q_r, k_T[t], sums[r * TOK_BLOCK + t]);
    }
  }
  {
    vf k_T[TOK_BLOCK];
#pragma GCC unroll 16
    for (int t = 0; t < TOK_BLOCK; ++t) k_T[t] = load_f16_part(k_rows[t] + 64, 8);
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) {
      const vf q_r = load_f32(q + r * K_PITCH + 64);
#pragma GCC unroll 16
      for (int t = 0; t < TOK_BLOCK; ++t) sums[r * TOK_BLOCK + t] = fma(q_r, k_T[t], sums[r * TOK_BLOCK + t]);
    }
  }
  alignas(64) float scores[LANES];
  store(scores, sum_each(sums));
  for (int r = 0; r < ROW_BLOCK; ++r) std::memcpy(s + r * TILE_PAD, scores + r * TOK_BLOCK, TOK_BLOCK * sizeof(float));
}

// acc[r][START ...] = alpha[r] * acc[r][START ...] + sum over keys of p[r][t] * v_t, for VECTORS vectors of d.
// Where MASKED, keys of weight zero are left out: 0 * NaN is NaN, and what a query does not see may hold one.
template <bool MASKED, int START, int VECTORS, int TAIL>
inline void weigh_block(const float* p, const int8_t* const* v_rows, int count, const float* alpha, float* acc) {
  vf sums[ROW_BLOCK][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) sums[r][c] = load_f32(acc + r * V_PITCH + START + c * LANES) * splat(alpha[r]);
  for (int t = 0; t < count; ++t) {
    vf v_D[VECTORS];
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c)
      v_D[c] = TAIL && c == VECTORS - 1 ? load_int8_part(v_rows[t] + START + c * LANES, TAIL)
                                        : load_int8(v_rows[t] + START + c * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) {
      if (MASKED && p[r * TILE_PAD + t] == 0.0f) continue;
#pragma GCC unroll 16
      for (int c = 0; c < VECTORS; ++c) sums[r][c] = fma(splat(p[r * TILE_PAD + t]), v_D[c], sums[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) store(acc + r * V_PITCH + START + c * LANES, sums[r][c]);
}

// One softmax step: ROW_BLOCK query rows (from `row` of the head, at `state` of the unit) against a tile of keys.
template <bool MASKED>
inline void attend_block(const Unit& u, const Rows& rows, int64_t state, int row, int64_t first, int count, float score_scale) {
  alignas(64) float s[ROW_BLOCK * TILE_PAD];
  const float* q = u.q + state * K_PITCH;
  for (int t = 0; t < count; t += TOK_BLOCK) {
    score_block(q, rows.k + t, s + t);
  }

  const int padded = (count + LANES - 1) / LANES * LANES;
  alignas(64) float change[LANES] = {};  // m before minus m after, then the factor 2^change on what was summed before
  float added[ROW_BLOCK];
  for (int r = 0; r < ROW_BLOCK; ++r) {
    float* s_r = s + r * TILE_PAD;
    for (int t = 0; t < count; t += LANES)
      store(s_r + t, load_f32(s_r + t) * splat(score_scale));
    if (MASKED) {
      const int64_t pos = u.position + (row + r) / GROUP;
      for (int t = 0; t < count; ++t) {
        const int64_t key = first + t;
        if (!((key <= pos) && (key + WINDOW >= pos))) s_r[t] = -INFINITY;
      }
    }
    for (int t = count; t < padded; ++t) s_r[t] = -INFINITY;
    vf top = splat(-INFINITY);
    for (int t = 0; t < padded; t += LANES) top = larger(top, load_f32(s_r + t));

    float& m = u.m[state + r];
    const float m_new = std::max(m, largest(top));
    // Where no key has been seen yet, 2^(-inf - 0) = 0 stands for every weight; -inf - -inf would be NaN.
    const float base = m_new == -INFINITY ? 0.0f : m_new;
    change[r] = m - base;
    m = m_new;
    vf sum = splat(0.0f);
    for (int t = 0; t < padded; t += LANES) {
      const vf weight = exp2v(load_f32(s_r + t) - splat(base));
      sum = sum + weight;
      store(s_r + t, weight);
    }
    added[r] = total(sum);
  }
  store(change, exp2v(load_f32(change)));
  for (int r = 0; r < ROW_BLOCK; ++r) u.l[state + r] = u.l[state + r] * change[r] + added[r];
  float* acc = u.acc + state * V_PITCH;
  weigh_block<MASKED, 0, 4, 0>(s, rows.v, count, change, acc);
  weigh_block<MASKED, 64, 1, 8>(s, rows.v, count, change, acc);
}

// Attention of the unit's rows over keys lo .. hi - 1, tile by tile; tiles lie on multiples of TILE.
template <bool MASKED>
inline void segment(const Args& a, const Unit& u, int64_t lo, int64_t hi) {
  for (int64_t first = lo; first < hi;) {
    const int64_t last = std::min(hi, (first / TILE + 1) * TILE);
    const int count = (int)(last - first);
    Tile tile;
    locate(a, u.pages, first, count, tile);
    for (int h = 0; h < HEADS; ++h) {
      Rows rows;
      point(a, tile, u.head0 + h, rows);
      const float score_scale = (float)a.score_scale;
      for (int row = 0; row < u.rows; row += ROW_BLOCK)
        attend_block<MASKED>(u, rows, h * u.rows_pad + row, row, first, count, score_scale);
    }
    first = last;
  }
}

// A thread's scratch, carved from the workspace; `bytes` is what one thread needs.
struct Scratch {
  uintptr_t at;
  template <typename T>
  T* take(int64_t count) {
    T* taken = (T*)at;
    at += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
  }
};

inline int64_t carve(Scratch scratch, int rows_pad, Unit& u) {
  const uintptr_t start = scratch.at;
  const int64_t rows = (int64_t)HEADS * rows_pad;
  u.rows_pad = rows_pad;
  u.q = scratch.take<float>(rows * K_PITCH);
  u.acc = scratch.take<float>(rows * V_PITCH);
  u.m = scratch.take<float>(rows);
  u.l = scratch.take<float>(rows);
  return (int64_t)(scratch.at - start);
}

// Loads the unit's queries (rows of one KV head are query-major: row = query * GROUP + head in the group), padded
// with zeros to whole blocks and vectors, and empties its state.
inline void begin(const Args& a, Unit& u, int64_t q_row) {
  const int64_t state_rows = (int64_t)HEADS * u.rows_pad;
  std::fill(u.acc, u.acc + state_rows * V_PITCH, 0.0f);
  std::fill(u.m, u.m + state_rows, -INFINITY);
  std::fill(u.l, u.l + state_rows, 0.0f);
  for (int h = 0; h < HEADS; ++h) {
    for (int row = 0; row < u.rows_pad; ++row) {
      float* q = u.q + ((int64_t)h * u.rows_pad + row) * K_PITCH;
      std::fill(q, q + K_PITCH, float(0));
      if (row >= u.rows) continue;
      const uint16_t* source =
          a.q + (q_row + row / GROUP) * a.q_stride_tok + ((u.head0 + h) * GROUP + row % GROUP) * a.q_stride_head;
      for (int d = 0; d < HEAD_DIM; ++d) q[d] = f16_to_f32(source[d]);
    }
  }
}

// Divides a row's sum by its weight. No key seen: out = 0 and lse = -inf.
inline float finish(const Unit& u, int64_t state, float v_scale, float* row) {
  const float l = u.l[state];
  const float factor = l == 0.0f ? 0.0f : v_scale / l;
  float* acc = u.acc + state * V_PITCH;
  for (int d = 0; d < V_HEAD_DIM; ++d) row[d] = acc[d] * factor;
  return l == 0.0f ? -INFINITY : u.m[state] + std::log2(l);
}

inline void write_row(const Args& a, int64_t q_row, int64_t head, const float* row, float lse) {
  uint16_t* out = a.out + q_row * a.out_stride_tok + head * a.out_stride_head;
  for (int d = 0; d < V_HEAD_DIM; ++d) out[d] = f32_to_f16(row[d]);
  a.lse[q_row * a.lse_stride_tok + head] = lse;
}

// Keys that some query at pos_first .. pos_last of a request with kv_len keys sees: lo .. hi - 1.
inline void key_range(int64_t pos_first, int64_t pos_last, int64_t kv_len, int64_t& lo, int64_t& hi) {
  lo = std::max<int64_t>(0, pos_first - WINDOW);
  hi = std::min<int64_t>(kv_len, pos_last + 1);
}
// Whole tiles that every such query sees: full_lo .. full_hi - 1, inside lo .. hi; empty when there are none.
inline void full_range(int64_t pos_first, int64_t pos_last, int64_t lo, int64_t hi, int64_t& full_lo, int64_t& full_hi) {
  full_lo = std::max<int64_t>(lo, pos_last - WINDOW);
  full_lo = std::min((full_lo + TILE - 1) / TILE * TILE, hi);
  full_hi = std::max(full_lo, std::min<int64_t>(hi, std::max<int64_t>(0, pos_first + 1) / TILE * TILE));
}

inline int64_t scratch_bytes() {
  Unit u;
  return carve(Scratch{0}, ROWS_PAD, u);
}

int run(const Args& a) {
  const int64_t tiles = (a.max_q_len + Q_TILE - 1) / Q_TILE;
  const int64_t units = a.batch * tiles * KV_HEADS;
  // More threads than units would only cost their start.
  const int threads = (int)std::max<int64_t>(1, std::min(a.num_threads, units));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Unit u;
    carve(Scratch{(uintptr_t)a.workspace + omp_get_thread_num() * scratch_bytes()}, ROWS_PAD, u);
    float row[V_HEAD_DIM];

    // Late tiles of a causal request are the longest: they go first.
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < units; ++item) {
      const int64_t b = item / KV_HEADS % a.batch, tile = tiles - 1 - item / (KV_HEADS * a.batch);
      const int64_t q_start = a.q_starts[b], q_len = a.q_starts[b + 1] - q_start, kv_len = a.kv_lens[b];
      const int64_t q_first = tile * Q_TILE, queries = std::min<int64_t>(Q_TILE, q_len - q_first);
      if (queries <= 0) continue;
      u.pages = a.page_table + b * a.table_stride;
      u.position = kv_len - q_len + q_first;
      u.rows = (int)queries * GROUP;
      u.head0 = (int)(item % KV_HEADS);
      int64_t lo, hi;
      key_range(u.position, u.position + queries - 1, kv_len, lo, hi);
      begin(a, u, q_start + q_first);
      int64_t full_lo, full_hi;
      full_range(u.position, u.position + queries - 1, lo, hi, full_lo, full_hi);
      segment<true>(a, u, lo, full_lo);
      segment<false>(a, u, full_lo, full_hi);
      segment<true>(a, u, full_hi, hi);

      for (int i = 0; i < u.rows; ++i) {
        const float lse = finish(u, i, a.v_scale[u.head0], row);
        write_row(a, q_start + q_first + i / GROUP, u.head0 * GROUP + i % GROUP, row, lse);
      }
    }
  }
  return 0;
}

// The first rule that lengths, row starts or page ids break, as `kvgen.ir.rules` numbers them; 0 for none.
inline int64_t broken_rule(const Args& a, int64_t num_pages, int64_t rows) {
  if (a.q_starts[0] != 0 || a.q_starts[a.batch] != rows) return 2;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t kv_len = a.kv_lens[b];
    if (kv_len < 0 || kv_len > a.table_width * PAGE) return 1;
    const int64_t q_len = (int64_t)a.q_starts[b + 1] - a.q_starts[b];
    if (q_len < 0) return 2;
    int64_t lo, hi;
    key_range(kv_len - q_len, kv_len - 1, kv_len, lo, hi);
    const int32_t* pages = a.page_table + b * a.table_stride;
    for (int64_t p = lo / PAGE; p < (kv_len + PAGE - 1) / PAGE; ++p)
      if (pages[p] < 0 || pages[p] >= num_pages) return 3;
  }
  return 0;
}


}  // namespace kvgen_prefill_3703c9ec_impl

// Before a launch: the bytes of workspace that it needs, or minus the number of the rule that its values break.
// They are looked at where `num_pages` is not negative; `rows` is the number of query rows.
extern "C" int64_t kvgen_prefill_3703c9ec_query(const void* args, int64_t num_pages, int64_t rows) {
  using namespace kvgen_prefill_3703c9ec_impl;
  const Args& a = *static_cast<const Args*>(args);
  if (num_pages >= 0)
    if (const int64_t rule = broken_rule(a, num_pages, rows)) return -rule;
  return a.num_threads * scratch_bytes();
}

extern "C" int kvgen_prefill_3703c9ec(const void* args) {
  return kvgen_prefill_3703c9ec_impl::run(*static_cast<const kvgen_prefill_3703c9ec_impl::Args*>(args));
}
