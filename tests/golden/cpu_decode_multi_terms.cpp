// kvgen decode (multi) for cpu-portable
// spec ecca8e1c: page kv head tok d, page 16, K bf16, V bf16
// schedule: heads=2 row_block=2 split_tokens=512 tile=32
// causal, aligned to the last key; documents; ALiBi; a sink for each head
//
// Attention of up to 8 queries a request over its pages. Work is cut into units of (request, 512 keys, 2 KV heads);
// a unit walks its pages once for all its heads, and the states of a request's units are merged in order, so that the
// bits of a result depend neither on the batch nor on the number of threads.
#include <atomic>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

namespace kvgen_decode_c6a7fb36_impl {

constexpr int Q_HEADS = 4;
constexpr int KV_HEADS = 2;
constexpr int HEAD_DIM = 64;
constexpr int V_HEAD_DIM = 64;
constexpr int PAGE = 16;  // tokens in a page
constexpr int GROUP = 2;  // query heads that share a KV head
constexpr int TILE = 32;  // keys between two softmax steps
constexpr int TILE_PAD = 32;  // scores of a tile, rounded up to whole vectors
constexpr int BLOCK = 16;  // keys of a tile that lie in one page
constexpr int BLOCKS = 2;  // pages of a tile, or 1 where a page has several tiles
constexpr int SPLIT = 512;  // keys of a unit of work
constexpr int HEADS = 2;  // KV heads of a unit of work
constexpr int ROW_BLOCK = 2;  // query rows that the inner kernels take at once
constexpr int K_PITCH = 64;  // elements of a prepared query row
constexpr int V_PITCH = 64;  // elements of an accumulator row
constexpr int TOK_BLOCK = 2;  // keys a call of the score kernel takes
constexpr float LOG2E = 1.4426950408889634;  // natural units to those of base 2
constexpr int SLOPE_HEADS = 4;  // heads of the first series of slopes
constexpr int ROPE_DIM = 16;  // elements of a key that are rotated
constexpr int K_STRIDE_HEAD = 1024;  // elements from one head to the next
constexpr int K_STRIDE_TOK = 64;  // elements from one token to the next
constexpr int V_STRIDE_HEAD = 1024;  // elements from one head to the next
constexpr int V_STRIDE_TOK = 64;  // elements from one token to the next

struct Args {
  uint16_t* q;  // queries, T x q_heads x head_dim
  int64_t q_stride_tok;  // elements
  int64_t q_stride_head;  // elements
  int32_t* q_starts;  // first query row of each request, B+1
  uint16_t* k;  // k plane
  int64_t k_stride_page;  // elements
  uint16_t* v;  // v plane
  int64_t v_stride_page;  // elements
  int32_t* page_table;  // page ids, B x P
  int64_t table_stride;  // elements from one request's row to the next
  int32_t* kv_lens;  // keys of each request, B
  int32_t* param_doc_start;  // batch x kv
  int64_t param_doc_start_stride_batch;  // elements
  float* param_sink_logit;  // head
  float* param_rope_table;  // kv x d
  int64_t param_rope_table_stride_kv;  // elements
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


inline float bf16_to_f32(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

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

// Round to nearest even; a NaN stays one.
inline uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t nan = (uint16_t)(bits >> 16 | 0x40);
  return (bits & 0x7fffffff) > 0x7f800000 ? nan : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// An infinity of V lasts until its weight vanishes, and is NaN from there on: all of them end as NaN.
inline float no_infinity(float x) { return x - x == 0.0f ? x : NAN; }

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
constexpr int LANES = 4;
inline vf splat(float x) { return vf{x, x, x, x}; }
inline vf load_f32(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }

inline vf load_bf16(const uint16_t* p) {
  const vi bits = {p[0], p[1], p[2], p[3]};
  return (vf)(bits << 16);
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline float largest(vf x) { return std::max(std::max(x[0], x[1]), std::max(x[2], x[3])); }
inline float total(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// Lane r of the result is the largest lane of x[r].
template <int N>
inline vf largest_each(const vf (&x)[N]) {
  alignas(64) float y[LANES] = {};
  for (int r = 0; r < N; ++r) y[r] = largest(x[r]);
  return load_f32(y);
}
inline vf zero_for_none(vf x) { return (vf)((vi)x & (x != splat(-INFINITY))); }

// 2^x for x <= 0, relative error 3e-7; exactly 1 at 0, 0 below the normal range, NaN at NaN.
inline vf exp2v(vf x) {
  const vi keep = ~(x < splat(-125.0f));
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
  const vf shifted = (vf)((vi)x & keep) + splat(12582912.0f);
  const vf part = x - (shifted - splat(12582912.0f));
  vf y = splat(1.3264727e-3f);
  y = fma(y, part, splat(9.671513e-3f));
  y = fma(y, part, splat(5.5507336e-2f));
  y = fma(y, part, splat(2.4022242e-1f));
  y = fma(y, part, splat(6.93147e-1f));
  y = fma(y, part, splat(1.0f));
  return (vf)(((vi)y + ((vi)shifted << 23)) & keep);
}

// Lane i of the result is the sum of the lanes of x[i].
inline vf sum_each(const vf (&x)[4]) { return vf{total(x[0]), total(x[1]), total(x[2]), total(x[3])}; }


// One unit of work: some heads of one request, a block of query rows, and the state of each row.
struct Unit {
  const int32_t* pages;  // the request's row of the page table
  int64_t position;      // of the first query row's token
  int rows, rows_pad;    // query rows of one KV head, and their number rounded up to ROW_BLOCK
  int head0;             // first KV head
  float* q;              // HEADS x rows_pad x K_PITCH
  float* acc;            // HEADS x rows_pad x V_PITCH
  float* m;              // HEADS x rows_pad / ROW_BLOCK x LANES: the running maximum, a lane for each row of a block
  float* l;              // HEADS x rows_pad x LANES: the sums of weights, lane by lane
  float* k_stage;        // TILE x HEAD_DIM
  int64_t* row_doc_start; // HEADS x rows_pad
  const int32_t** row_doc_start_at; // HEADS x rows_pad
  float* row_of_head;    // HEADS x rows_pad
};

// Where the pages of a tile lie, as offsets that all heads share.
struct Tile {
  int64_t k[BLOCKS], v[BLOCKS];
  int64_t first;  // the first key's position
};

// The same for one head: rows of K, rows of V, and their scales.
struct Rows {
  const float* k[TILE_PAD];
  const uint16_t* v[TILE_PAD];
};

// The tile that begins at key `first`, of which begin .. end - 1 exist. Columns of the table without
// such keys may hold anything: a page beside them stands in for theirs.
inline void locate(const Args& a, const int32_t* pages, int64_t first, int begin, int end, Tile& tile) {
  tile.first = first;
  for (int i = 0; i < BLOCKS; ++i) {
    const int64_t page = pages[(first + std::max(begin, std::min(i * BLOCK, end - 1))) / PAGE];
    tile.k[i] = page * a.k_stride_page;
    tile.v[i] = page * a.v_stride_page;
  }
}

// A row of K rotated to its position: elements i and ROPE_DIM / 2 + i by the i-th angle. `turn` holds the cosines
// of all angles, then their sines. Elements from ROPE_DIM on pass.
inline void rotate(const float* x, const float* turn, float* turned) {
  for (int i = 0; i < ROPE_DIM / 2; ++i) {
    const float first = x[i], second = x[ROPE_DIM / 2 + i];
    const float cosine = turn[i], sine = turn[ROPE_DIM / 2 + i];
    turned[i] = first * cosine - second * sine;
    turned[ROPE_DIM / 2 + i] = second * cosine + first * sine;
  }
  for (int d = ROPE_DIM; d < HEAD_DIM; ++d) turned[d] = x[d];
}

// Copies the tile's rows of K for one head, rotated to their positions, to rows of HEAD_DIM.
inline void stage_k(const Args& a, const uint16_t* k, const Tile& tile, int begin, int end, float* rows) {
  for (int t = begin; t < end; ++t) {
    const uint16_t* row = k + tile.k[t / BLOCK] + (t % BLOCK) * K_STRIDE_TOK;
    float x[HEAD_DIM];
    for (int d = 0; d < HEAD_DIM; ++d) x[d] = bf16_to_f32(row[d]);
    rotate(x, a.param_rope_table + (tile.first + t) * a.param_rope_table_stride_kv, rows + t * HEAD_DIM);
  }
}

// The tile for one head. Rows of keys that are not there repeat one that is, so that whole blocks can be computed.
inline void point(const Args& a, const Unit& u, const Tile& tile, int64_t head, int begin, int end, Rows& rows) {
  const uint16_t* k_head = a.k + head * K_STRIDE_HEAD;
  const uint16_t* v_head = a.v + head * V_STRIDE_HEAD;
  stage_k(a, k_head, tile, begin, end, u.k_stage);
  for (int t = 0; t < TILE_PAD; ++t) rows.k[t] = u.k_stage + std::max(begin, std::min(t, end - 1)) * HEAD_DIM;
  for (int t = 0; t < TILE_PAD; ++t) {
    const int key = std::max(begin, std::min(t, end - 1));
    const int64_t at = (key % BLOCK) * V_STRIDE_TOK;
    rows.v[t] = v_head + tile.v[key / BLOCK] + at;
  }
}

// s[r][t] = q_r . k_t for ROW_BLOCK queries and TOK_BLOCK keys. Lanes run along d and are summed at the end.
inline void score_block(const float* q, const float* const* k_rows, float* s) {
  vf sums[ROW_BLOCK * TOK_BLOCK] = {};
  for (int d = 0; d < 64; d += 4) {
    vf k_T[TOK_BLOCK];
#pragma GCC unroll 16
    for (int t = 0; t < TOK_BLOCK; ++t) k_T[t] = load_f32(k_rows[t] + d);
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) {
      const vf q_r = load_f32(q + r * K_PITCH + d);
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
template <bool MASKED, int START, int VECTORS>
inline void weigh_block(const float* p, const uint16_t* const* v_rows, int begin, int count, const float* alpha, float* acc) {
  vf sums[ROW_BLOCK][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) sums[r][c] = load_f32(acc + r * V_PITCH + START + c * LANES) * splat(alpha[r]);
  for (int t = begin; t < count; ++t) {
    vf v_D[VECTORS];
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c)
      v_D[c] = load_bf16(v_rows[t] + START + c * LANES);
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
// WHOLE: every key of the tile is there and every row sees it.
template <bool WHOLE>
inline void attend_block(const Unit& u, const Rows& rows, int64_t state, int row, int64_t first, int begin, int end, float score_scale) {
  alignas(64) float s[ROW_BLOCK * TILE_PAD];
  const float* q = u.q + state * K_PITCH;
  const int vectors = ((WHOLE ? TILE : end) + LANES - 1) / LANES;
  for (int t = begin / TOK_BLOCK * TOK_BLOCK; t < end; t += TOK_BLOCK) {
    score_block(q, rows.k + t, s + t);
  }

  bool seen[ROW_BLOCK * TILE_PAD] = {};  // which row sees which key, where not WHOLE
  vf top_R[ROW_BLOCK];
  for (int r = 0; r < ROW_BLOCK; ++r) {
    float* s_r = s + r * TILE_PAD;
    vf largest_r = splat(-INFINITY);
    const int64_t pos = u.position + (row + r) / GROUP;
    const int64_t row_doc_start = u.row_doc_start[state + r];
    const int32_t* row_doc_start_at = u.row_doc_start_at[state + r];
    const float row_of_head = u.row_of_head[state + r];
    for (int t = 0; t < vectors * LANES; t += LANES) {
      store(s_r + t, load_f32(s_r + t) * splat(score_scale));
    }
    for (int t = begin; t < (WHOLE ? TILE : end); ++t) {
      const int64_t key = first + t;
      const float score = s_r[t];
      s_r[t] = score - row_of_head * float(std::abs(pos - key));
    }
    if (!WHOLE) {
      for (int t = 0; t < begin; ++t) s_r[t] = -INFINITY;
      for (int t = begin; t < end; ++t) {
        const int64_t key = first + t;
        seen[r * TILE_PAD + t] = key <= pos && (int64_t)row_doc_start_at[key] == row_doc_start;
        if (!seen[r * TILE_PAD + t]) s_r[t] = -INFINITY;
      }
      for (int t = end; t < vectors * LANES; ++t) s_r[t] = -INFINITY;
    }
    for (int t = 0; t < vectors * LANES; t += LANES) largest_r = larger(largest_r, load_f32(s_r + t));
    top_R[r] = largest_r;
  }
  // A lane for each row. Where a row has seen no key yet, 2^(-inf - 0) = 0 stands for every weight; -inf - -inf would
  // be NaN.
  alignas(64) float base[LANES], change[LANES];  // what scores are relative to; the factor on what was summed before
  float* m = u.m + state / ROW_BLOCK * LANES;
  const vf top = largest_each(top_R), m_new = larger(top, load_f32(m)), m_base = zero_for_none(m_new);
  store(change, exp2v(load_f32(m) - m_base));
  store(m, m_new);
  store(base, m_base);
  for (int r = 0; r < ROW_BLOCK; ++r) {
    float* s_r = s + r * TILE_PAD;
    vf sum = splat(0.0f);
    for (int t = 0; t < vectors * LANES; t += LANES) {
      const vf weight_T = exp2v(load_f32(s_r + t) - splat(base[r]));
      sum = sum + weight_T;
      store(s_r + t, weight_T);
    }
    // A weight of zero stands for a key that is not seen: those of keys that are seen do not vanish.
    if (!WHOLE)
      for (int t = begin; t < end; ++t)
        if (seen[r * TILE_PAD + t] && s_r[t] == 0) s_r[t] = 0x1p-126f;
    float* l = u.l + (state + r) * LANES;
    store(l, fma(load_f32(l), splat(change[r]), sum));
  }
  float* acc = u.acc + state * V_PITCH;
  weigh_block<!WHOLE, 0, 4>(s, rows.v, begin, end, change, acc);
  weigh_block<!WHOLE, 16, 4>(s, rows.v, begin, end, change, acc);
  weigh_block<!WHOLE, 32, 4>(s, rows.v, begin, end, change, acc);
  weigh_block<!WHOLE, 48, 4>(s, rows.v, begin, end, change, acc);

}

// Attention of the unit's rows over keys lo .. hi - 1, tile by tile; tiles lie on multiples of TILE.
template <bool MASKED>
inline void segment(const Args& a, const Unit& u, int64_t lo, int64_t hi) {
  if (lo >= hi) return;
  Tile tile;
  locate(a, u.pages, lo / TILE * TILE, (int)(lo % TILE), (int)std::min<int64_t>(TILE, hi - lo / TILE * TILE), tile);
  for (int64_t first = lo / TILE * TILE; first < hi; first += TILE) {
    const int begin = (int)std::max<int64_t>(0, lo - first), end = (int)std::min<int64_t>(TILE, hi - first);
    const bool whole = end - begin == TILE;
    if (first > lo) locate(a, u.pages, first, begin, end, tile);
    for (int h = 0; h < HEADS; ++h) {
      Rows rows;
      point(a, u, tile, u.head0 + h, begin, end, rows);
      const float score_scale = (float)a.score_scale;
      for (int row = 0; row < u.rows; row += ROW_BLOCK)
        if (!MASKED && whole)
          attend_block<true>(u, rows, (int64_t)h * u.rows_pad + row, row, first, 0, TILE, score_scale);
        else
          attend_block<false>(u, rows, (int64_t)h * u.rows_pad + row, row, first, begin, end, score_scale);
    }
  }
}

// A thread's scratch, carved from the workspace; `carve` gives the bytes that one thread needs.
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
  u.m = scratch.take<float>(rows / ROW_BLOCK * LANES);
  u.l = scratch.take<float>(rows * LANES);
  u.k_stage = scratch.take<float>(TILE * HEAD_DIM);
  u.row_doc_start = scratch.take<int64_t>(rows);
  u.row_doc_start_at = scratch.take<const int32_t*>(rows);
  u.row_of_head = scratch.take<float>(rows);
  return (int64_t)(scratch.at - start);
}

// Loads the unit's queries (rows of one KV head are query-major: row = query * GROUP + head in the group), padded
// with zeros to whole blocks and vectors, and empties its state.
inline void begin(const Args& a, Unit& u, int64_t q_row) {
  const int64_t state_rows = (int64_t)HEADS * u.rows_pad;
  std::fill(u.acc, u.acc + state_rows * V_PITCH, 0.0f);
  std::fill(u.m, u.m + state_rows / ROW_BLOCK * LANES, -INFINITY);
  std::fill(u.l, u.l + state_rows * LANES, 0.0f);
  for (int h = 0; h < HEADS; ++h) {
    for (int row = 0; row < u.rows_pad; ++row) {
      const int64_t state = (int64_t)h * u.rows_pad + row;
      const uint16_t* source =
          a.q + (q_row + row / GROUP) * a.q_stride_tok + ((u.head0 + h) * GROUP + row % GROUP) * a.q_stride_head;
      float* q = u.q + state * K_PITCH;
      std::fill(q, q + K_PITCH, float(0));
      if (row >= u.rows) continue;
      for (int d = 0; d < HEAD_DIM; ++d) q[d] = bf16_to_f32(source[d]);
    }
  }
}

// Divides a row's sum by its weight. No key seen: out = 0 and lse = -inf.
inline float finish(const Unit& u, int64_t state, float* row) {
  const float l = total(load_f32(u.l + state * LANES));
  const float factor = l == 0.0f ? 0.0f : 1.0f / l;
  float* acc = u.acc + state * V_PITCH;
  for (int d = 0; d < V_HEAD_DIM; ++d) row[d] = acc[d] * factor;
  return l == 0.0f ? -INFINITY : u.m[state / ROW_BLOCK * LANES + state % ROW_BLOCK] + std::log2(l);
}

// Adds the sink of a head to a finished state, as a key whose value is zero. Returns the factor on the row.
inline float add_sink(const Args& a, int64_t head, float& lse) {
  const float sink = a.param_sink_logit[head] * LOG2E, before = lse;
  if (sink == -INFINITY) return 1.0f;
  const float top = std::max(before, sink), own = std::exp2(before - top), sum = own + std::exp2(sink - top);
  lse = top + std::log2(sum);
  return own / sum;
}

inline void write_row(const Args& a, int64_t q_row, int64_t head, const float* row, float lse) {
  const float factor = add_sink(a, head, lse);
  uint16_t* out = a.out + q_row * a.out_stride_tok + head * a.out_stride_head;
  for (int d = 0; d < V_HEAD_DIM; ++d) out[d] = f32_to_bf16(no_infinity(row[d] * factor));
  a.lse[q_row * a.lse_stride_tok + head] = lse;
}

// Keys that some query at pos_first .. pos_last of a request with kv_len keys sees: lo .. hi - 1.
inline void key_range(const Args& a, int64_t b, int64_t pos_first, int64_t pos_last, int64_t kv_len, int64_t& lo, int64_t& hi) {
  if (kv_len <= 0 || pos_first > pos_last) {  // no position to ask for
    lo = hi = 0;
    return;
  }
  lo = std::max<int64_t>(0, (int64_t)a.param_doc_start[b * a.param_doc_start_stride_batch + std::max<int64_t>(0, pos_first)]);
  hi = std::min<int64_t>(kv_len, pos_last + 1);
}
// Whole tiles that every such query sees: full_lo .. full_hi - 1, inside lo .. hi; empty when there are none.
inline void full_range(const Args& a, int64_t b, int64_t pos_first, int64_t pos_last, int64_t lo, int64_t hi, int64_t& full_lo, int64_t& full_hi) {
  full_lo = std::max<int64_t>(lo, (int64_t)a.param_doc_start[b * a.param_doc_start_stride_batch + std::max<int64_t>(0, pos_last)]);
  full_lo = std::min((full_lo + TILE - 1) / TILE * TILE, hi);
  full_hi = std::max(full_lo, std::min<int64_t>(hi, std::max<int64_t>(0, pos_first + 1) / TILE * TILE));
}

// The queries of request b: its first row, how many, the position of the first, and the splits that hold its keys.
struct Request {
  int64_t q_row, q_len, position, lo, hi, first_split, splits;
};

inline Request request(const Args& a, int64_t b) {
  Request r;
  const int64_t kv_len = a.kv_lens[b];
  r.q_row = a.q_starts[b];
  r.q_len = a.q_starts[b + 1] - r.q_row;
  r.position = kv_len - r.q_len;
  key_range(a, b, r.position, r.position + r.q_len - 1, kv_len, r.lo, r.hi);
  r.first_split = r.lo / SPLIT;
  r.splits = r.q_len > 0 && r.hi > r.lo ? (r.hi - 1) / SPLIT - r.first_split + 1 : 0;
  return r;
}

// What masks and scores know of each row before it meets a key; padding is like the last row.
inline void know_rows(const Args& a, const Unit& u, int64_t b, const Request& r) {
  for (int h = 0; h < HEADS; ++h) {
    for (int row = 0; u.rows && row < u.rows_pad; ++row) {
      const int64_t state = (int64_t)h * u.rows_pad + row;
      const int own = std::min(row, u.rows - 1);
      u.row_doc_start[state] = (int64_t)a.param_doc_start[b * a.param_doc_start_stride_batch + std::max<int64_t>(0, r.position + own / GROUP)];
      u.row_doc_start_at[state] = a.param_doc_start + b * a.param_doc_start_stride_batch;
      u.row_of_head[state] = 1.4426950408889634f * std::exp2(-8.0f * float(((u.head0 + h) * GROUP + own % GROUP) + 1) / float(SLOPE_HEADS));
    }
  }
}

// Workspace: a scratch for each thread, then the partial rows (V_HEAD_DIM values and an lse each) of every query.
inline int64_t scratch_bytes(const Args& a) {
  Unit u;
  const int rows_pad = ((int)a.max_q_len * GROUP + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
  return carve(Scratch{0}, rows_pad, u);
}

inline int64_t most_splits(const Args& a) {
  int64_t most = 0;
  for (int64_t b = 0; b < a.batch; ++b) most = std::max(most, request(a, b).splits);
  return most;
}

int run(const Args& a) {
  const int64_t splits = most_splits(a);
  const int64_t thread_bytes = scratch_bytes(a);
  const int rows_pad = ((int)a.max_q_len * GROUP + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
  const int64_t units = a.batch * splits * (KV_HEADS / HEADS);
  // More threads than units would only cost their start.
  const int threads = (int)std::max<int64_t>(1, std::min(a.num_threads, units));
  float* partials = (float*)(a.workspace + a.num_threads * thread_bytes);
  // A partial row stands at [query row][split][query head].
  const auto partial = [&](int64_t q_row, int64_t split, int64_t head) {
    return partials + ((q_row * splits + split) * Q_HEADS + head) * (V_HEAD_DIM + 1);
  };

  std::atomic<int64_t> next{0};
  const auto attend = [&](int thread) {
    Unit u;
    carve(Scratch{(uintptr_t)a.workspace + thread * thread_bytes}, rows_pad, u);
    float row[V_HEAD_DIM];

    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
      const int64_t b = item / (splits * (KV_HEADS / HEADS)), split = item / (KV_HEADS / HEADS) % splits;
      const Request r = request(a, b);
      if (split >= r.splits) continue;
      const int64_t lo = std::max(r.lo, (r.first_split + split) * SPLIT);
      const int64_t hi = std::min(r.hi, (r.first_split + split + 1) * SPLIT);
      u.pages = a.page_table + b * a.table_stride;
      u.position = r.position;
      u.rows = (int)r.q_len * GROUP;
      u.head0 = (int)(item % (KV_HEADS / HEADS)) * HEADS;
      begin(a, u, r.q_row);
      know_rows(a, u, b, r);
      int64_t full_lo, full_hi;
      full_range(a, b, r.position, r.position + r.q_len - 1, lo, hi, full_lo, full_hi);
      segment<true>(a, u, lo, full_lo);
      segment<false>(a, u, full_lo, full_hi);
      segment<true>(a, u, full_hi, hi);

      for (int h = 0; h < HEADS; ++h) {
        for (int i = 0; i < u.rows; ++i) {
          const int64_t q_row = r.q_row + i / GROUP, head = (u.head0 + h) * GROUP + i % GROUP;
          float* target = r.splits == 1 ? row : partial(q_row, split, head);
          const float lse = finish(u, (int64_t)h * rows_pad + i, target);
          if (r.splits == 1)
            write_row(a, q_row, head, row, lse);
          else
            target[V_HEAD_DIM] = lse;
        }
      }
    }
  };
  // The splits of one request's query head; a request of one split is finished.
  const auto merge = [&](int64_t item) {
    const int64_t head = item % Q_HEADS;
    const Request r = request(a, item / Q_HEADS);
    if (r.splits == 1) return;
    float row[V_HEAD_DIM];
    for (int64_t q_row = r.q_row; q_row < r.q_row + r.q_len; ++q_row) {
      float top = -INFINITY, sum = 0;
      for (int64_t s = 0; s < r.splits; ++s) top = std::max(top, partial(q_row, s, head)[V_HEAD_DIM]);
      const float base = top == -INFINITY ? 0.0f : top;  // -inf - -inf would be NaN
      std::fill(row, row + V_HEAD_DIM, 0.0f);
      for (int64_t s = 0; s < r.splits; ++s) {
        const float* state = partial(q_row, s, head);
        const float weight = std::exp2(state[V_HEAD_DIM] - base);
        sum += weight;
        for (int d = 0; d < V_HEAD_DIM; ++d) row[d] += weight * state[d];
      }
      const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
      for (int d = 0; d < V_HEAD_DIM; ++d) row[d] *= factor;
      write_row(a, q_row, head, row, sum == 0.0f ? -INFINITY : top + std::log2(sum));
    }
  };

  const int64_t merges = a.batch * Q_HEADS;
  if (threads == 1) {  // a team of one costs 0.8 us, more than a short request
    attend(0);
    for (int64_t item = 0; item < merges; ++item) merge(item);
    return 0;
  }
#pragma omp parallel num_threads(threads)
  {
    attend(omp_get_thread_num());
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t item = 0; item < merges; ++item) merge(item);
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
    key_range(a, b, kv_len - q_len, kv_len - 1, kv_len, lo, hi);
    if (lo >= hi) continue;
    const int32_t* pages = a.page_table + b * a.table_stride;
    for (int64_t p = lo / PAGE; p < (hi + PAGE - 1) / PAGE; ++p)
      if (pages[p] < 0 || pages[p] >= num_pages) return 3;
  }
  return 0;
}

// A scratch for each thread, and the partial states.
inline int64_t workspace_bytes(const Args& a) {
  const int64_t rows = a.q_starts[a.batch];
  return a.num_threads * scratch_bytes(a) + rows * most_splits(a) * Q_HEADS * (V_HEAD_DIM + 1) * (int64_t)sizeof(float);
}


}  // namespace kvgen_decode_c6a7fb36_impl

// Before a launch: the bytes of workspace that it needs, or minus the number of the rule that its values break.
// They are looked at where `num_pages` is not negative; `rows` is the number of query rows.
extern "C" int64_t kvgen_decode_c6a7fb36_query(const void* args, int64_t num_pages, int64_t rows) {
  using namespace kvgen_decode_c6a7fb36_impl;
  const Args& a = *static_cast<const Args*>(args);
  if (num_pages >= 0)
    if (const int64_t rule = broken_rule(a, num_pages, rows)) return -rule;
  return workspace_bytes(a);
}

extern "C" int kvgen_decode_c6a7fb36(const void* args) {
  return kvgen_decode_c6a7fb36_impl::run(*static_cast<const kvgen_decode_c6a7fb36_impl::Args*>(args));
}
