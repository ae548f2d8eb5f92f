// kvgen copy for cpu-avx512 +bf16 +vnni
// spec 71e2bbf1: page kv head tok d, page 5, K int8, V f16
// schedule: nothing to choose
//
// Copies whole pages, plane by plane, in the longest runs that are contiguous inside a page.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace kvgen_copy_d9de669a_impl {


struct Args {
  int8_t* k;  // k plane
  int64_t k_stride_page;  // elements
  uint16_t* v;  // v plane
  int64_t v_stride_page;  // elements
  int32_t* src_pages;  // pages to read, N
  int32_t* dst_pages;  // pages to write, N
  int64_t num_pairs;  // pairs N
  int64_t num_threads;  // CPU threads to use
};


inline void copy_k(const Args& a, int64_t from, int64_t to) {
  const int8_t* source = a.k + from * a.k_stride_page;
  int8_t* target = a.k + to * a.k_stride_page;
  std::memcpy(target, source, 1440 * sizeof(int8_t));
}

inline void copy_v(const Args& a, int64_t from, int64_t to) {
  const uint16_t* source = a.v + from * a.v_stride_page;
  uint16_t* target = a.v + to * a.v_stride_page;
  for (int64_t head = 0; head < 4; ++head) {
    for (int64_t tok = 0; tok < 5; ++tok) {
      const int64_t at = head * 480 + tok * 96;
      std::memcpy(target + at, source + at, 72 * sizeof(uint16_t));
    }
  }
}

int run(const Args& a) {
#pragma omp parallel for num_threads((int)a.num_threads) schedule(static)
  for (int64_t pair = 0; pair < a.num_pairs; ++pair) {
    const int64_t from = a.src_pages[pair], to = a.dst_pages[pair];
    copy_k(a, from, to);
    copy_v(a, from, to);
  }
  return 0;
}

}  // namespace kvgen_copy_d9de669a_impl

extern "C" int kvgen_copy_d9de669a(const void* args) {
  return kvgen_copy_d9de669a_impl::run(*static_cast<const kvgen_copy_d9de669a_impl::Args*>(args));
}
