// kvgen prefill for cpu-avx512
// spec 1cd0add7: kv page tok head d, page 5, K f16, V int8
// schedule: prefetch=1 row_block=4 rows=512 tile=256
// causal, aligned to the last key; window of 128 earlier keys
//
// Attention of the queries of a ragged batch over each request's pages. A unit is (request, 170 queries, one KV head):
// each tile of keys is staged once, as panels that vectors read in place, and used by all rows of the unit. Tiles lie
// on multiples of TILE, so that a row's bits do not depend on how its request was cut into chunks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <immintrin.h>

namespace kvgen_prefill_ace9cbca_impl {

constexpr int KV_HEADS = 2;
constexpr int HEAD_DIM = 72;
constexpr int V_HEAD_DIM = 72;
constexpr int PAGE = 5;  // tokens in a page
constexpr int GROUP = 3;  // query heads that share a KV head
constexpr int TILE = 256;  // keys between two softmax steps
constexpr int Q_TILE = 170;  // queries of a unit of work
constexpr int ROW_BLOCK = 4;  // query rows that the inner kernels take at once
constexpr int STATES = 16;  // query rows of a block, rounded up to whole vectors
constexpr int COLUMNS = 64;  // keys of a panel of K
constexpr int K_WORDS = 80;  // words of a key in such a panel
constexpr int V_WORDS = 80;  // words of a row of the panel of V
constexpr int V_PITCH = 80;  // elements of an accumulator row
constexpr int WINDOW = 128;  // earlier keys that a query sees
constexpr int K_STRIDE_TOK = 192;  // elements from one token to the next
constexpr int K_STRIDE_HEAD = 96;  // elements from one head to the next
constexpr int V_STRIDE_TOK = 256;  // elements from one token to the next
constexpr int V_STRIDE_HEAD = 128;  // elements from one head to the next

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


// Rounded to nearest even; the last vector overlaps the one before where N is no multiple of 16.
template <int N>
inline void narrow_f16(const float* x, uint16_t* y) {
  for (int d = 0; d < N; d += 16) {
    const int at = std::min(d, N - 16);
    _mm256_storeu_si256((__m256i*)(y + at), _mm512_cvtps_ph(_mm512_loadu_ps(x + at), _MM_FROUND_TO_NEAREST_INT));
  }
}

// An infinity of V lasts until its weight vanishes, and is NaN from there on: all of them end as NaN.
inline float no_infinity(float x) { return x - x == 0.0f ? x : NAN; }

// N elements in whole vectors; the last one overlaps the one before where N is no multiple of 16.
template <int N>
inline void widen_f16(const uint16_t* x, float* y) {
  for (int d = 0; d < N; d += 16) {
    const int at = std::min(d, N - 16);
    _mm512_storeu_ps(y + at, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(x + at))));
  }
}


using vf = __m512;
constexpr int LANES = 16;
inline vf splat(float x) { return _mm512_set1_ps(x); }
inline vf load_f32(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

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

// Into L2. Not the intrinsic: GCC drops calls of functions that do nothing but prefetch, as if they had no effect.
inline void prefetch(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }

// The lanes begin <= i < end of x; the others become `rest`.
inline vf seen(vf x, int begin, int end, float rest) {
  const uint32_t below = end <= 0 ? 0 : end >= LANES ? 0xffff : (1u << end) - 1;
  const uint32_t from = begin <= 0 ? 0xffff : begin >= LANES ? 0 : 0xffffu << begin;
  return _mm512_mask_mov_ps(splat(rest), (__mmask16)(below & from), x);
}

inline vf times(vf b, const float* a, vf sum) { return fma(b, splat(*a), sum); }
inline void store_weights(float* p, vf x) { store(p, x); }

// 16 words of 32 bits of 16 rows, transposed: word w of row i goes to panel[w][i].
inline void transpose(const float* const* rows, int at, float* panel, int pitch) {
  __m512i x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(rows[i] + at);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // x[4 j + k] holds words k, 4 + k, 8 + k and 12 + k of rows 4 j .. 4 j + 3, one in each 128-bit lane.
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512i even0 = _mm512_shuffle_i32x4(x[k], x[k + 4], 0x88), odd0 = _mm512_shuffle_i32x4(x[k], x[k + 4], 0xdd);
    const __m512i even1 = _mm512_shuffle_i32x4(x[k + 8], x[k + 12], 0x88), odd1 = _mm512_shuffle_i32x4(x[k + 8], x[k + 12], 0xdd);
    _mm512_storeu_si512(panel + k * pitch, _mm512_shuffle_i32x4(even0, even1, 0x88));
    _mm512_storeu_si512(panel + (k + 4) * pitch, _mm512_shuffle_i32x4(odd0, odd1, 0x88));
    _mm512_storeu_si512(panel + (k + 8) * pitch, _mm512_shuffle_i32x4(even0, even1, 0xdd));
    _mm512_storeu_si512(panel + (k + 12) * pitch, _mm512_shuffle_i32x4(odd0, odd1, 0xdd));
  }
}

// One unit of work: up to Q_TILE queries of one request for one KV head, the state of each row, and the tile at hand.
struct Unit {
  const int32_t* pages;  // the request's row of the page table
  int64_t head;          // KV head
  int64_t position;      // of the first query
  int64_t kv_len;        // keys of the request
  int rows;              // query rows: row = query * GROUP + head in the group
  float* q;              // rows x HEAD_DIM
  float* acc;            // rows x V_PITCH
  float *m, *l;          // of a row: the running maximum of the scaled scores, the sum of 2^(score - m)
  float* k;              // panels of TILE keys
  float* v;
};

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

inline int64_t carve(Scratch scratch, const Args& a, Unit& u) {
  const uintptr_t start = scratch.at;
  const int64_t queries = std::min<int64_t>(Q_TILE, a.max_q_len);
  const int64_t rows = (queries * GROUP + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
  u.q = scratch.take<float>(rows * HEAD_DIM);
  u.acc = scratch.take<float>(rows * V_PITCH);
  u.m = scratch.take<float>(rows);
  u.l = scratch.take<float>(rows);
  u.k = scratch.take<float>(TILE * K_WORDS);
  u.v = scratch.take<float>(TILE * V_WORDS);
  return (int64_t)(scratch.at - start);
}

// Keys that some query at pos_first .. pos_last of a request with kv_len keys sees: lo .. hi - 1.
inline void key_range(int64_t pos_first, int64_t pos_last, int64_t kv_len, int64_t& lo, int64_t& hi) {
  lo = std::max<int64_t>(0, pos_first - WINDOW);
  hi = std::min<int64_t>(kv_len, pos_last + 1);
}

// A row of K as f32 numbers.
inline void decode_k(const uint16_t* row, float* out) {
  widen_f16<HEAD_DIM>(row, out);
}

// Keys begin .. end - 1 of the tile whose first key is `first`, as panels; the rest of a vector of keys is zero.
inline void stage_k(const Args& a, const Unit& u, int64_t first, int begin, int end) {
  alignas(64) static constexpr float no_key[K_WORDS] = {};
  const uint16_t* k_head = a.k + u.head * K_STRIDE_HEAD;
  alignas(64) float decoded[LANES][K_WORDS] = {};
  for (int t = begin / LANES * LANES; t < end; t += LANES) {
    const float* rows[LANES];
    for (int i = 0; i < LANES; ++i) {
      rows[i] = no_key;
      if (t + i < begin || t + i >= end) continue;
      const int64_t key = first + t + i, page = u.pages[key / PAGE], tok = key % PAGE;
      decode_k(k_head + page * a.k_stride_page + tok * K_STRIDE_TOK, decoded[i]);
      rows[i] = decoded[i];
    }
    float* panel = u.k + (t / COLUMNS * COLUMNS * K_WORDS + t % COLUMNS);
    for (int w = 0; w < K_WORDS; w += LANES) transpose(rows, w, panel + w * COLUMNS, COLUMNS);
  }
}

// A row of V as f32 codes, which are exact.
inline void decode_v(const int8_t* row, float* out) {
  for (int d = 0; d < V_HEAD_DIM; ++d) out[d] = (float)row[d];
}

// The same keys of V. A key outside begin .. end - 1 is zero where one inside shares its vector of keys.
inline void stage_v(const Args& a, const Unit& u, int64_t first, int begin, int end) {
  const int8_t* v_head = a.v + u.head * V_STRIDE_HEAD;
  for (int t = begin / COLUMNS * COLUMNS; t < end; t += 1) {
    float* row = u.v + t * V_WORDS;
    if (t < begin) {
      std::fill(row, row + V_WORDS, 0.0f);
      continue;
    }
    const int64_t key = first + t, page = u.pages[key / PAGE], tok = key % PAGE;
    decode_v(v_head + page * a.v_stride_page + tok * V_STRIDE_TOK, row);
  }
}

// Fetches rows into L2: of the tile that begins at `first`, block `part` of `parts` of the keys before `hi`.
inline void prefetch_share(const Args& a, const Unit& u, int64_t first, int64_t hi, int part, int parts) {
  const int share = (TILE + parts - 1) / parts;
  const int64_t end = std::min(std::min(first + TILE, hi), first + (part + 1) * share);
  for (int64_t key = first + part * share; key < end; ++key) {
    const int64_t page = u.pages[key / PAGE], tok = key % PAGE;
    const char* k = (const char*)(a.k + page * a.k_stride_page + tok * K_STRIDE_TOK + u.head * K_STRIDE_HEAD);
    for (size_t at = 0; at < HEAD_DIM * sizeof *a.k; at += 64) prefetch(k + at);
    const char* v = (const char*)(a.v + page * a.v_stride_page + tok * V_STRIDE_TOK + u.head * V_STRIDE_HEAD);
    for (size_t at = 0; at < V_HEAD_DIM * sizeof *a.v; at += 64) prefetch(v + at);
  }
}

// sums[r][c] += row r of `left` times column vector c of a panel, over `steps` of its rows of words.
template <int VECTORS>
inline __attribute__((always_inline)) void multiply(const float* left, int left_pitch, const float* panel,
                                                    int panel_pitch, int steps, vf (&sums)[ROW_BLOCK][VECTORS]) {
  for (int k = 0; k < steps; ++k) {
    vf b[VECTORS];
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) b[c] = load_f32(panel + k * panel_pitch + c * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
      for (int c = 0; c < VECTORS; ++c) sums[r][c] = times(b[c], left + r * left_pitch + k, sums[r][c]);
  }
}

// Of a tile of keys, those that each row of a block sees: begin <= t < end.
struct Seen {
  int begin[ROW_BLOCK], end[ROW_BLOCK];
};

// Scaled scores of VECTORS vectors of keys from key t of the tile on; `top` gathers the largest of each row.
template <bool MASKED, int VECTORS>
inline void score_columns(const Unit& u, int row, int t, const Seen& keys, vf score_scale, float* s, vf* top) {
  const float* q = u.q + row * HEAD_DIM;
  const float* panel = u.k + (t / COLUMNS * COLUMNS * K_WORDS + t % COLUMNS);
  vf sums[ROW_BLOCK][VECTORS] = {};
  multiply(q, HEAD_DIM, panel, COLUMNS, HEAD_DIM, sums);
#pragma GCC unroll 16
  for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) {
      const int at = t + c * LANES;
      vf x = sums[r][c] * score_scale;
      if (MASKED) x = seen(x, keys.begin[r] - at, keys.end[r] - at, -INFINITY);
      store(s + r * TILE + at, x);
      top[r] = larger(top[r], x);
    }
}

// acc[r][START ...] = alpha[r] * acc[r][START ...] + sum over keys from .. end - 1 of p[r][t] * v_t, for VECTORS vectors of d.
template <bool MASKED, int START, int VECTORS>
inline void weigh(const Unit& u, int row, int from, int end, const float* p, const float* alpha) {
  float* acc = u.acc + (int64_t)row * V_PITCH + START;
  vf sums[ROW_BLOCK][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) sums[r][c] = load_f32(acc + r * V_PITCH + c * LANES) * splat(alpha[r]);
  multiply(p + from, TILE, u.v + from * V_WORDS + START, V_WORDS, end - from, sums);
#pragma GCC unroll 16
  for (int r = 0; r < ROW_BLOCK; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) store(acc + r * V_PITCH + c * LANES, sums[r][c]);
}

// One softmax step of ROW_BLOCK query rows against keys from .. end - 1 of the tile. MASKED: not every row sees all of
// the tile; else from = 0 and end = TILE.
template <bool MASKED>
inline void attend_block(const Unit& u, int row, int from, int end, const Seen& keys, vf score_scale) {
  alignas(64) float s[ROW_BLOCK * TILE];
  alignas(64) float p[ROW_BLOCK * TILE];
  vf top[ROW_BLOCK];
  for (int r = 0; r < ROW_BLOCK; ++r) top[r] = splat(-INFINITY);
  const int padded = (end + LANES - 1) / LANES * LANES;
  int t = from;
  for (; t + COLUMNS <= padded; t += COLUMNS) score_columns<MASKED, 4>(u, row, t, keys, score_scale, s, top);
  if (MASKED) {
    if (padded - t == 1 * LANES) score_columns<true, 1>(u, row, t, keys, score_scale, s, top);
    if (padded - t == 2 * LANES) score_columns<true, 2>(u, row, t, keys, score_scale, s, top);
    if (padded - t == 3 * LANES) score_columns<true, 3>(u, row, t, keys, score_scale, s, top);
  }

  alignas(64) float alpha[STATES] = {};  // m before minus m after, then the factor 2^alpha on what was summed before
  float added[ROW_BLOCK];
  for (int r = 0; r < ROW_BLOCK; ++r) {
    float* s_r = s + r * TILE;
    float& m = u.m[row + r];
    const float m_new = std::max(m, largest(top[r]));
    // Where no key has been seen yet, 2^(-inf - 0) = 0 stands for every weight; -inf - -inf would be NaN.
    const float base = m_new == -INFINITY ? 0.0f : m_new;
    alpha[r] = m - base;
    m = m_new;
    vf sum = splat(0.0f);
    for (t = from; t < padded; t += LANES) {
      const vf weight = exp2v(load_f32(s_r + t) - splat(base));
      sum = sum + weight;
      store_weights(p + r * TILE + t, weight);
    }
    added[r] = total(sum);
  }
  for (int r = 0; r < STATES; r += LANES) store(alpha + r, exp2v(load_f32(alpha + r)));
  for (int r = 0; r < ROW_BLOCK; ++r) u.l[row + r] = u.l[row + r] * alpha[r] + added[r];
  weigh<MASKED, 0, 4>(u, row, from, end, p, alpha);
  weigh<MASKED, 64, 1>(u, row, from, end, p, alpha);
}

// The same for the keys of a tile that the rows of a block see; `first` is the tile's first key.
inline void attend_rows(const Unit& u, int row, int64_t first, vf score_scale) {
  Seen keys;
  for (int r = 0; r < ROW_BLOCK; ++r) {
    // Rows that only fill the last block see what the last row sees.
    const int64_t pos = u.position + std::min(row + r, u.rows - 1) / GROUP;
    int64_t lo, hi;
    key_range(pos, pos, u.kv_len, lo, hi);
    keys.begin[r] = (int)std::clamp<int64_t>(lo - first, 0, TILE);
    keys.end[r] = (int)std::clamp<int64_t>(hi - first, 0, TILE);
  }
  // Later rows begin and end later.
  const int from = keys.begin[0] / COLUMNS * COLUMNS, end = keys.end[ROW_BLOCK - 1];
  if (keys.begin[ROW_BLOCK - 1] == 0 && keys.end[0] == TILE)
    attend_block<false>(u, row, 0, TILE, keys, score_scale);
  else if (from < end)
    attend_block<true>(u, row, from, end, keys, score_scale);
}

// Loads the unit's queries, padded with zeros to whole blocks, and empties its state.
inline void begin(const Args& a, const Unit& u, int64_t q_row) {
  const int rows = (u.rows + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
  std::fill(u.acc, u.acc + (int64_t)rows * V_PITCH, 0.0f);
  std::fill(u.m, u.m + rows, -INFINITY);
  std::fill(u.l, u.l + rows, 0.0f);
  std::fill(u.q + u.rows * HEAD_DIM, u.q + rows * HEAD_DIM, float(0));
  for (int row = 0; row < u.rows; ++row) {
    float* q = u.q + row * HEAD_DIM;
    const uint16_t* x = a.q + (q_row + row / GROUP) * a.q_stride_tok + (u.head * GROUP + row % GROUP) * a.q_stride_head;
    widen_f16<HEAD_DIM>(x, q);
  }
}

// Divides the sums of a row by its weight and writes it. No key seen: out = 0 and lse = -inf.
inline void finish(const Args& a, const Unit& u, int row, int64_t q_row) {
  const int64_t token = q_row + row / GROUP, head = u.head * GROUP + row % GROUP;
  const float l = u.l[row];
  const float factor = l == 0.0f ? 0.0f : a.v_scale[u.head] / l;
  const float* acc = u.acc + (int64_t)row * V_PITCH;
  uint16_t* out = a.out + token * a.out_stride_tok + head * a.out_stride_head;
  float y[V_HEAD_DIM];
  for (int d = 0; d < V_HEAD_DIM; ++d) y[d] = no_infinity(acc[d] * factor);
  narrow_f16<V_HEAD_DIM>(y, out);
  a.lse[token * a.lse_stride_tok + head] = l == 0.0f ? -INFINITY : u.m[row] + std::log2(l);
}

inline int64_t scratch_bytes(const Args& a) {
  Unit u;
  return carve(Scratch{0}, a, u);
}

int run(const Args& a) {
  const int64_t tiles = (a.max_q_len + Q_TILE - 1) / Q_TILE;
  const int64_t units = a.batch * tiles * KV_HEADS;
  // More threads than units would only cost their start.
  const int threads = (int)std::max<int64_t>(1, std::min(a.num_threads, units));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Unit u;
    carve(Scratch{(uintptr_t)a.workspace + omp_get_thread_num() * scratch_bytes(a)}, a, u);

    // Late tiles of a causal request are the longest: they go first.
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < units; ++item) {
      const int64_t b = item / KV_HEADS % a.batch, tile = tiles - 1 - item / (KV_HEADS * a.batch);
      const int64_t q_start = a.q_starts[b], q_len = a.q_starts[b + 1] - q_start;
      const int64_t q_first = tile * Q_TILE, queries = std::min<int64_t>(Q_TILE, q_len - q_first);
      if (queries <= 0) continue;
      u.pages = a.page_table + b * a.table_stride;
      u.head = item % KV_HEADS;
      u.kv_len = a.kv_lens[b];
      u.position = u.kv_len - q_len + q_first;
      u.rows = (int)queries * GROUP;
      begin(a, u, q_start + q_first);

      int64_t lo, hi;
      key_range(u.position, u.position + queries - 1, u.kv_len, lo, hi);
      const vf score_scale = splat((float)a.score_scale);
      for (int64_t first = lo / TILE * TILE; first < hi; first += TILE) {
        const int begin_key = (int)std::max<int64_t>(lo - first, 0), end_key = (int)std::min<int64_t>(hi - first, TILE);
        stage_k(a, u, first, begin_key, end_key);
        stage_v(a, u, first, begin_key, end_key);
        const int parts = (u.rows + ROW_BLOCK - 1) / ROW_BLOCK;
        for (int row = 0; row < u.rows; row += ROW_BLOCK) {
          prefetch_share(a, u, first + TILE, hi, row / ROW_BLOCK, parts);
          attend_rows(u, row, first, score_scale);
        }
      }
      for (int row = 0; row < u.rows; ++row) finish(a, u, row, q_start + q_first);
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
    if (lo >= hi) continue;
    const int32_t* pages = a.page_table + b * a.table_stride;
    for (int64_t p = lo / PAGE; p < (hi + PAGE - 1) / PAGE; ++p)
      if (pages[p] < 0 || pages[p] >= num_pages) return 3;
  }
  return 0;
}


}  // namespace kvgen_prefill_ace9cbca_impl

// Before a launch: the bytes of workspace that it needs, or minus the number of the rule that its values break.
// They are looked at where `num_pages` is not negative; `rows` is the number of query rows.
extern "C" int64_t kvgen_prefill_ace9cbca_query(const void* args, int64_t num_pages, int64_t rows) {
  using namespace kvgen_prefill_ace9cbca_impl;
  const Args& a = *static_cast<const Args*>(args);
  if (num_pages >= 0)
    if (const int64_t rule = broken_rule(a, num_pages, rows)) return -rule;
  return a.num_threads * scratch_bytes(a);
}

extern "C" int kvgen_prefill_ace9cbca(const void* args) {
  return kvgen_prefill_ace9cbca_impl::run(*static_cast<const kvgen_prefill_ace9cbca_impl::Args*>(args));
}
