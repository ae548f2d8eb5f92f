// kvgen decode (single) for cpu-avx512 +bf16
// spec dd71d05d: page kv head tok d, page 16, K bf16, V bf16
// schedule: heads=8 prefetch=1 row_block=4 split_tokens=512 tile=16
//
// Attention of one query a request over its pages. Work is cut into units of (request, 512 keys, 8 KV heads);
// a unit walks its pages once for all its heads, and the states of a request's units are merged in order, so that the
// bits of a result depend neither on the batch nor on the number of threads.
#include <atomic>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <immintrin.h>

namespace kvgen_decode_be6e725b_impl {

constexpr int Q_HEADS = 32;
constexpr int KV_HEADS = 8;
constexpr int HEAD_DIM = 128;
constexpr int V_HEAD_DIM = 128;
constexpr int PAGE = 16;  // tokens in a page
constexpr int GROUP = 4;  // query heads that share a KV head
constexpr int TILE = 16;  // keys between two softmax steps
constexpr int TILE_PAD = 16;  // scores of a tile, rounded up to whole vectors
constexpr int BLOCK = 16;  // keys of a tile that lie in one page
constexpr int BLOCKS = 1;  // pages of a tile, or 1 where a page has several tiles
constexpr int SPLIT = 512;  // keys of a unit of work
constexpr int HEADS = 8;  // KV heads of a unit of work
constexpr int ROW_BLOCK = 4;  // query rows that the inner kernels take at once
constexpr int K_PITCH = 128;  // elements of a prepared query row
constexpr int V_PITCH = 128;  // elements of an accumulator row
constexpr int TOK_BLOCK = 4;  // keys a call of the score kernel takes
constexpr int K_STRIDE_HEAD = 2048;  // elements from one head to the next
constexpr int K_STRIDE_TOK = 128;  // elements from one token to the next
constexpr int V_STRIDE_HEAD = 2048;  // elements from one head to the next
constexpr int V_STRIDE_TOK = 128;  // elements from one token to the next

struct Args {
  uint16_t* q;  // queries, T x q_heads x head_dim
  int64_t q_stride_tok;  // elements
  int64_t q_stride_head;  // elements
  uint16_t* k;  // k plane
  int64_t k_stride_page;  // elements
  uint16_t* v;  // v plane
  int64_t v_stride_page;  // elements
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


// Round to nearest even; a NaN stays one.
inline uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t nan = (uint16_t)(bits >> 16 | 0x40);
  return (bits & 0x7fffffff) > 0x7f800000 ? nan : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// An infinity of V lasts until its weight vanishes, and is NaN from there on: all of them end as NaN.
inline float no_infinity(float x) { return x - x == 0.0f ? x : NAN; }

using vf = __m512;
constexpr int LANES = 16;
inline vf splat(float x) { return _mm512_set1_ps(x); }
inline vf load_f32(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

// bf16 pairs: one instruction multiplies 32 elements and adds neighbours into 16 f32 lanes. Not the intrinsic: GCC 12
// copies every sum to another register and back around it, and spills some of them.
using vpairs = __m512i;
inline vpairs load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
inline vf dot_pairs(vpairs a, vpairs b, vf c) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
}
inline vpairs splat_pair(const uint16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}
inline void store_bf16(uint16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }

inline vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
inline float largest(vf x) { return _mm512_reduce_max_ps(x); }
inline float total(vf x) { return _mm512_reduce_add_ps(x); }

// Lane r of the result is the largest lane of x[r].
template <int N>
inline vf largest_each(const vf (&x)[N]) {
  if constexpr (N == 4) {
    const vf low = larger(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const vf high = larger(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    vf y = larger(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xEE));
    y = larger(y, _mm512_shuffle_f32x4(y, y, 0x4E));
    return larger(y, _mm512_shuffle_f32x4(y, y, 0xB1));
  }
  alignas(64) float y[LANES] = {};
  for (int r = 0; r < N; ++r) y[r] = largest(x[r]);
  return load_f32(y);
}
inline vf zero_for_none(vf x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(-INFINITY), _CMP_NEQ_UQ), x); }

// 2^x for x <= 0, relative error 3e-6, less than a 16-bit result shows; exactly 1 at 0, 0 at -inf, NaN at NaN (max returns its second operand there).
inline vf exp2v(vf x) {
  x = _mm512_max_ps(splat(-150.0f), x);
  const vf whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf part = x - whole;
  vf y = splat(9.58285e-3f);
  y = fma(y, part, splat(5.590642e-2f));
  y = fma(y, part, splat(2.4024099e-1f));
  y = fma(y, part, splat(6.9312419e-1f));
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

// Two rows of 32 elements as pairs (row 0, row 1) of the same element. Unpacking works within 128-bit lanes, so
// `low` holds elements 0-3, 8-11, 16-19, 24-27 and `high` the others; `unweave` restores the order at the end.
inline void weave(vpairs row0, vpairs row1, vpairs& low, vpairs& high) {
  low = _mm512_unpacklo_epi16(row0, row1);
  high = _mm512_unpackhi_epi16(row0, row1);
}
inline void unweave(float* x) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const vf low = load_f32(x), high = load_f32(x + 16);
  store(x, _mm512_permutex2var_ps(low, first, high));
  store(x + 16, _mm512_permutex2var_ps(low, second, high));
}

// Into L2. Not the intrinsic: GCC drops calls of functions that do nothing but prefetch, as if they had no effect.
inline void prefetch(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }


struct Tile;

// One unit of work: some heads of one request, a block of query rows, and the state of each row.
struct Unit {
  const int32_t* pages;  // the request's row of the page table
  int64_t position;      // of the first query row's token
  int rows, rows_pad;    // query rows of one KV head, and their number rounded up to ROW_BLOCK
  int head0;             // first KV head
  const Tile* after;     // the first tile of the thread's unit to come; null for none
  uint16_t* q;           // HEADS x rows_pad x K_PITCH
  float* acc;            // HEADS x rows_pad x V_PITCH
  float* m;              // HEADS x rows_pad / ROW_BLOCK x LANES: the running maximum, a lane for each row of a block
  float* l;              // HEADS x rows_pad x LANES: the sums of weights, lane by lane
};

// Where the pages of a tile lie, as offsets that all heads share.
struct Tile {
  int64_t k[BLOCKS], v[BLOCKS];
};

// The same for one head: rows of K, rows of V, and their scales.
struct Rows {
  const uint16_t* k[TILE_PAD];
  const uint16_t* v[TILE_PAD];
  const uint16_t* k_next[TILE_PAD];  // the same head's in the tile to come
  const uint16_t* v_next[TILE_PAD];
};

// The tile that begins at key `first`, of which begin .. end - 1 exist. Columns of the table without
// such keys may hold anything: a page beside them stands in for theirs.
inline void locate(const Args& a, const int32_t* pages, int64_t first, int end, Tile& tile) {
  for (int i = 0; i < BLOCKS; ++i) {
    const int64_t page = pages[(first + std::min(i * BLOCK, end - 1)) / PAGE];
    tile.k[i] = page * a.k_stride_page;
    tile.v[i] = page * a.v_stride_page;
  }
}

// The tile for one head. Rows of keys that are not there repeat one that is, so that whole blocks can be computed.
inline void point(const Args& a, const Tile& tile, const Tile& next, int64_t head, int end, Rows& rows) {
  const uint16_t* k_head = a.k + head * K_STRIDE_HEAD;
  const uint16_t* v_head = a.v + head * V_STRIDE_HEAD;
  for (int t = 0; t < TILE_PAD; ++t) {
    const int key = std::min(t, end - 1);
    const int64_t at = (key % BLOCK) * K_STRIDE_TOK;
    rows.k[t] = k_head + tile.k[key / BLOCK] + at;
    rows.k_next[t] = k_head + next.k[key / BLOCK] + at;
  }
  for (int t = 0; t < TILE_PAD; ++t) {
    const int key = std::min(t, end - 1);
    const int64_t at = (key % BLOCK) * V_STRIDE_TOK;
    rows.v[t] = v_head + tile.v[key / BLOCK] + at;
    rows.v_next[t] = v_head + next.v[key / BLOCK] + at;
  }
}

// s[r][t] = q_r . k_t for ROW_BLOCK queries and TOK_BLOCK keys. Lanes run along d and are summed at the end.
// For each line that is read, the one in its place in the tile to come is fetched into L2.
inline void score_block(const uint16_t* q, const uint16_t* const* k_rows, const uint16_t* const* k_next, float* s) {
  vf sums[ROW_BLOCK * TOK_BLOCK] = {};
  for (int d = 0; d < 128; d += 32) {
#pragma GCC unroll 16
    for (int t = 0; t < TOK_BLOCK; ++t) prefetch((const char*)(k_next[t] + d));
    vpairs k_T[TOK_BLOCK];
#pragma GCC unroll 16
    for (int t = 0; t < TOK_BLOCK; ++t) k_T[t] = load_pairs(k_rows[t] + d);
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) {
      const vpairs q_r = load_pairs(q + r * K_PITCH + d);
#pragma GCC unroll 16
      for (int t = 0; t < TOK_BLOCK; ++t) sums[r * TOK_BLOCK + t] = dot_pairs(q_r, k_T[t], sums[r * TOK_BLOCK + t]);
    }
  }
  alignas(64) float scores[LANES];
  store(scores, sum_each(sums));
  for (int r = 0; r < ROW_BLOCK; ++r) std::memcpy(s + r * TILE_PAD, scores + r * TOK_BLOCK, TOK_BLOCK * sizeof(float));
}

// acc[r][START ...] = alpha[r] * acc[r][START ...] + sum over keys of p[r][t] * v_t, for WEAVES pairs of vectors.
// Keys go two at a time: a pair of V rows is woven so that one instruction multiplies and adds both.
template <int START, int WEAVES>
inline void weigh_block(const uint16_t* p, const uint16_t* const* v_rows, const uint16_t* const* v_next, int count, const float* alpha, float* acc) {
  vf sums[ROW_BLOCK][2 * WEAVES];
#pragma GCC unroll 16
  for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < 2 * WEAVES; ++c) sums[r][c] = load_f32(acc + r * V_PITCH + START + c * LANES) * splat(alpha[r]);
  for (int t = 0; t < count; t += 2) {
    vpairs v_D[2 * WEAVES];
#pragma GCC unroll 16
    for (int c = 0; c < WEAVES; ++c) {
      const int d = START + c * 2 * LANES;
      prefetch((const char*)(v_next[t] + d));
      prefetch((const char*)(v_next[t + 1] + d));
      weave(load_pairs(v_rows[t] + d), load_pairs(v_rows[t + 1] + d), v_D[2 * c], v_D[2 * c + 1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) {
      const vpairs p_r = splat_pair(p + r * TILE_PAD + t);
#pragma GCC unroll 16
      for (int c = 0; c < 2 * WEAVES; ++c) sums[r][c] = dot_pairs(v_D[c], p_r, sums[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < 2 * WEAVES; ++c) store(acc + r * V_PITCH + START + c * LANES, sums[r][c]);
}

// One softmax step: ROW_BLOCK query rows (from `row` of the head, at `state` of the unit) against a tile of keys.
// WHOLE: every key of the tile is there.
template <bool WHOLE>
inline void attend_block(const Unit& u, const Rows& rows, int64_t state, int row, int end, float score_scale) {
  alignas(64) float s[ROW_BLOCK * TILE_PAD];
  const uint16_t* q = u.q + state * K_PITCH;
  const int vectors = ((WHOLE ? TILE : end) + LANES - 1) / LANES;
  // The next tile is fetched by the first block of rows; to fetch what is at hand costs the others nothing.
  const uint16_t* const* k_next = row == 0 ? rows.k_next : rows.k;
  for (int t = 0; t < end; t += TOK_BLOCK) {
    score_block(q, rows.k + t, k_next + t, s + t);
  }

  vf top_R[ROW_BLOCK];
  for (int r = 0; r < ROW_BLOCK; ++r) {
    float* s_r = s + r * TILE_PAD;
    vf largest_r = splat(-INFINITY);
    for (int t = 0; t < vectors * LANES; t += LANES) {
      const vf score = load_f32(s_r + t) * splat(score_scale);
      store(s_r + t, score);
      if (WHOLE) largest_r = larger(largest_r, score);
    }
    if (!WHOLE) {
      for (int t = end; t < vectors * LANES; ++t) s_r[t] = -INFINITY;
      for (int t = 0; t < vectors * LANES; t += LANES) largest_r = larger(largest_r, load_f32(s_r + t));
    }
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
  alignas(64) uint16_t p[ROW_BLOCK * TILE_PAD];
  for (int r = 0; r < ROW_BLOCK; ++r) {
    float* s_r = s + r * TILE_PAD;
    vf sum = splat(0.0f);
    for (int t = 0; t < vectors * LANES; t += LANES) {
      const vf weight_T = exp2v(load_f32(s_r + t) - splat(base[r]));
      sum = sum + weight_T;
      store_bf16(p + r * TILE_PAD + t, weight_T);
    }
    float* l = u.l + (state + r) * LANES;
    store(l, fma(load_f32(l), splat(change[r]), sum));
  }
  float* acc = u.acc + state * V_PITCH;
  weigh_block<0, 2>(p, rows.v, row == 0 ? rows.v_next : rows.v, end, change, acc);
  weigh_block<64, 2>(p, rows.v, row == 0 ? rows.v_next : rows.v, end, change, acc);

}

// Attention of the unit's rows over keys lo .. hi - 1, tile by tile; tiles lie on multiples of TILE.
inline void segment(const Args& a, const Unit& u, int64_t lo, int64_t hi) {
  if (lo >= hi) return;
  Tile tile, next;
  locate(a, u.pages, lo / TILE * TILE, (int)std::min<int64_t>(TILE, hi - lo / TILE * TILE), tile);
  for (int64_t first = lo / TILE * TILE; first < hi; first += TILE) {
    const int end = (int)std::min<int64_t>(TILE, hi - first);
    const bool whole = end == TILE;
    // What comes next is fetched into L2 while this tile is computed, line for line.
    if (first + TILE < hi) locate(a, u.pages, first + TILE, (int)std::min<int64_t>(TILE, hi - first - TILE), next);
    for (int h = 0; h < HEADS; ++h) {
      Rows rows;
      point(a, tile, first + TILE < hi ? next : u.after ? *u.after : tile, u.head0 + h, end, rows);
      const float score_scale = (float)a.score_scale;
      for (int row = 0; row < u.rows; row += ROW_BLOCK)
        if (whole)
          attend_block<true>(u, rows, (int64_t)h * u.rows_pad + row, row, TILE, score_scale);
        else
          attend_block<false>(u, rows, (int64_t)h * u.rows_pad + row, row, end, score_scale);
    }
    tile = next;
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
  u.q = scratch.take<uint16_t>(rows * K_PITCH);
  u.acc = scratch.take<float>(rows * V_PITCH);
  u.m = scratch.take<float>(rows / ROW_BLOCK * LANES);
  u.l = scratch.take<float>(rows * LANES);
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
      uint16_t* q = u.q + state * K_PITCH;
      std::fill(q, q + K_PITCH, uint16_t(0));
      if (row >= u.rows) continue;
      for (int d = 0; d < HEAD_DIM; ++d) q[d] = source[d];
    }
  }
}

// Divides a row's sum by its weight. No key seen: out = 0 and lse = -inf.
inline float finish(const Unit& u, int64_t state, float* row) {
  const float l = total(load_f32(u.l + state * LANES));
  const float factor = l == 0.0f ? 0.0f : 1.0f / l;
  float* acc = u.acc + state * V_PITCH;
  for (int d = 0; d < V_PITCH; d += 2 * LANES) unweave(acc + d);
  for (int d = 0; d < V_HEAD_DIM; ++d) row[d] = acc[d] * factor;
  return l == 0.0f ? -INFINITY : u.m[state / ROW_BLOCK * LANES + state % ROW_BLOCK] + std::log2(l);
}

inline void write_row(const Args& a, int64_t q_row, int64_t head, const float* row, float lse) {
  uint16_t* out = a.out + q_row * a.out_stride_tok + head * a.out_stride_head;
  for (int d = 0; d < V_HEAD_DIM; ++d) out[d] = f32_to_bf16(no_infinity(row[d]));
  a.lse[q_row * a.lse_stride_tok + head] = lse;
}


// The queries of request b: its first row, how many, the position of the first, and the splits that hold its keys.
struct Request {
  int64_t q_row, q_len, position, lo, hi, first_split, splits;
};

inline Request request(const Args& a, int64_t b) {
  Request r;
  const int64_t kv_len = a.kv_lens[b];
  r.q_row = b;
  r.q_len = 1;
  r.position = kv_len - r.q_len;
  r.lo = 0;
  r.hi = kv_len;
  r.first_split = r.lo / SPLIT;
  r.splits = r.hi > r.lo ? (r.hi - 1) / SPLIT - r.first_split + 1 : 0;
  return r;
}

// The first tile of a unit; false for a split that its request does not have.
inline bool locate_first(const Args& a, int64_t unit, int64_t splits, Tile& tile) {
  const Request r = request(a, unit / splits);
  const int64_t split = unit % splits;
  if (split >= r.splits) return false;
  const int64_t lo = std::max(r.lo, (r.first_split + split) * SPLIT), first = lo / TILE * TILE;
  const int64_t hi = std::min(r.hi, (r.first_split + split + 1) * SPLIT);
  locate(a, a.page_table + unit / splits * a.table_stride, first, (int)std::min<int64_t>(TILE, hi - first), tile);
  return true;
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

    // A unit is taken while the one before it is computed: that one's last tile fetches its first.
    Tile after;
    int64_t following = next.fetch_add(1, std::memory_order_relaxed);
    for (int64_t item; (item = following) < units;) {
      following = next.fetch_add(1, std::memory_order_relaxed);
      u.after = following < units && locate_first(a, following, splits, after) ? &after : nullptr;
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
      segment(a, u, lo, hi);

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
inline int64_t broken_rule(const Args& a, int64_t num_pages) {
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t kv_len = a.kv_lens[b];
    if (kv_len < 0 || kv_len > a.table_width * PAGE) return 1;
    const int32_t* pages = a.page_table + b * a.table_stride;
    for (int64_t p = 0; p < (kv_len + PAGE - 1) / PAGE; ++p)
      if (pages[p] < 0 || pages[p] >= num_pages) return 3;
  }
  return 0;
}

// A scratch for each thread, and the partial states.
inline int64_t workspace_bytes(const Args& a) {
  const int64_t rows = a.batch;
  return a.num_threads * scratch_bytes(a) + rows * most_splits(a) * Q_HEADS * (V_HEAD_DIM + 1) * (int64_t)sizeof(float);
}


}  // namespace kvgen_decode_be6e725b_impl

// Before a launch: the bytes of workspace that it needs, or minus the number of the rule that its values break.
// They are looked at where `num_pages` is not negative; `rows` is the number of query rows.
extern "C" int64_t kvgen_decode_be6e725b_query(const void* args, int64_t num_pages, int64_t /*rows*/) {
  using namespace kvgen_decode_be6e725b_impl;
  const Args& a = *static_cast<const Args*>(args);
  if (num_pages >= 0)
    if (const int64_t rule = broken_rule(a, num_pages)) return -rule;
  return workspace_bytes(a);
}

extern "C" int kvgen_decode_be6e725b(const void* args) {
  return kvgen_decode_be6e725b_impl::run(*static_cast<const kvgen_decode_be6e725b_impl::Args*>(args));
}
