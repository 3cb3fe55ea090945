// Products, norms and paged attention for CPUs, called through XLA's FFI.
//
// All rest on one rule: every element of a product is a single chain of fused multiply-adds in float32 over
// k = 0, 1, 2, ... A chain may be interrupted (stored and loaded again, which is exact) but never split. So an
// element's bits depend neither on the number of rows nor on blocks, threads or the width of a vector register.
//
// GCC's vector extensions (which Clang has too) stand for intrinsics: the same text is AVX2, AVX-512 and NEON. Only the
// products of bfloat16 have a text of their own where there is an instruction for them (AVX-512 BF16).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // AVX2; two registers on NEON, which has twice as many
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

constexpr int kMaxRows = 6;           // rows of a register block; with two vectors of columns they fill 16 registers
constexpr int kStrip = 4 * kLanes;    // columns that are computed together
// The block of a weight that is computed at a time. Few rows wait for memory, which likes long lines; many rows
// want their sums to stay in registers for long.
constexpr int64_t kFewRows = 8;
constexpr int64_t kFewDepth = 32, kFewColumns = 1024;
constexpr int64_t kDepth = 128, kColumns = 256;

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

// ---- numbers ------------------------------------------------------------------------------------------------

inline Floats Splat(float x) { return x - Floats{}; }

inline Floats Wide(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Words Bits(const void* p) {
  Halves x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Words);
}

inline Floats Wide(const BFloat16* p) { return (Floats)(Bits(p) << 16); }

inline Floats Wide(const Float16* p) {
  Words bits = Bits(p), magnitude = bits & 0x7fff;
  Words normal = ((magnitude << 13) + (112u << 23)) | ((Words)(magnitude >= 0x7c00) & 0x7f800000);
  Words subnormal = (Words)(__builtin_convertvector((Ints)magnitude, Floats) * Splat(0x1p-24f));
  return (Floats)((magnitude < 0x400 ? subnormal : normal) | (bits & 0x8000) << 16);
}

template <typename T>
inline Floats Wide(const T* p, int64_t count) {  // the first `count` of a vector, zeros behind
  if (count >= kLanes) return Wide(p);
  T part[kLanes] = {};
  if (count > 0) std::memcpy(part, p, count * sizeof(T));
  return Wide(part);
}

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Rounding to nearest even, as XLA does it.
inline void Narrow(float x, float* to) { *to = x; }

inline void Narrow(float x, BFloat16* to) {
  uint32_t bits = BitsOf(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to->bits = x == x ? rounded : (bits >> 16 | 0x40);
}

inline void Narrow(float x, Float16* to) {
  uint32_t bits = BitsOf(x), magnitude = bits & 0x7fffffff;
  float size = x < 0 ? -x : x;
  uint32_t small = BitsOf(size + 0.5f) - 0x3f000000;  // the addition rounds to a multiple of 2^-24
  uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  uint32_t result = magnitude < (113u << 23) ? small : normal;
  result = magnitude >= 0x477ff000 ? 0x7c00 : result;
  result = magnitude > 0x7f800000 ? 0x7e00 : result;
  to->bits = result | (bits >> 16 & 0x8000);
}

inline Floats Max(Floats a, Floats b) { return a > b ? a : b; }

// e^x for x <= 0, within 2 ulp; e^0 is 1 exactly and anything below -87 gives 0.
inline Floats Exp(Floats x) {
  const Floats magic = Splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats clamped = Max(x, Splat(-88.0f));
  Floats n = (clamped * Splat(1.44269504f) + magic) - magic;
  Floats r = clamped - n * Splat(0.693359375f) - n * Splat(-2.12194440e-4f);
  Floats p = Splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f})
    p = p * r + Splat(c);
  Floats scale = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
  return x > Splat(-87.0f) ? p * scale : Floats{};
}

// ---- threads and memory -------------------------------------------------------------------------------------

// XLA's own threads flush denormals; whoever calls us from elsewhere must get the same bits.
struct FlushDenormals {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(saved | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved); }
#endif
};

// work(i) for every i below n, on this thread and on those of XLA's pool that come in time. A thread that comes
// late finds nothing to do and touches nothing but the counters.
template <typename Work>
void ParallelFor(ffi::ThreadPool& pool, int64_t n, const Work& work) {
  struct State { std::atomic<int64_t> next{0}, done{0}; };
  auto state = std::make_shared<State>();
  auto loop = [state, n, &work] {
    FlushDenormals flush;
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      work(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t helper = std::min(pool.num_threads(), n); helper > 1; --helper) pool.Schedule([loop] { loop(); });
  loop();
  // What is left takes microseconds, unless its thread has lost its core to another process: give way then.
  for (int spins = 0; state->done.load(std::memory_order_acquire) < n; ++spins) {
    if (spins > 4000) std::this_thread::yield();
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}

// Memory of a thread that outlives the call; aligned for vectors.
class Scratch {
 public:
  float* Get(size_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = (count + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
    }
    return data_;
  }
  ~Scratch() { std::free(data_); }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

// ---- products -----------------------------------------------------------------------------------------------

// A block of memory that is fetched while another is computed, line by line and row by row, as memory likes it.
struct Ahead {
  const char* next;
  int64_t lines, left, jump;  // of a row, of the current row, from the end of a row to the next

  void Fetch() {
    __builtin_prefetch(next, 0, 2);
    next += 64;
    if (--left == 0) next += jump, left = lines;
  }
};

// Keeps the compiler from reading a column from memory once for every row: three loads a cycle are one too many.
#if defined(__x86_64__)
#define IN_REGISTER(x) asm("" : "+v"(x))
#else
#define IN_REGISTER(x)
#endif

// c[kRows][kVectors * kLanes] (+)= a[kRows][depth] @ b[depth][same columns], in registers. Where `wide` is given,
// b is left there in float32, [depth][kStrip]. With every k one line of `ahead` is fetched; in bursts the fetches
// would stall the arithmetic.
template <typename T, int kRows, int kVectors>
void Block(const float* a, int64_t lda, const void* b, int64_t ldb, float* c, int64_t ldc, int64_t depth, bool fresh,
           float* wide, Ahead* ahead) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = fresh ? Floats{} : Wide(c + r * ldc + v * kLanes);
  auto row = static_cast<const T*>(b);
  for (int64_t k = 0; k < depth; ++k, row += ldb) {
    Floats column[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      column[v] = Wide(row + v * kLanes);
      if (kRows > 1 && kRows * kVectors + kVectors < 16) IN_REGISTER(column[v]);
    }
    if (kVectors * kLanes == kStrip && kRows <= 2) {
      if (ahead) ahead->Fetch();
      if (wide) std::memcpy(wide + k * kStrip, column, sizeof column);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Floats x = Splat(a[r * lda + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = x * column[v] + sum[r][v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) std::memcpy(c + r * ldc + v * kLanes, &sum[r][v], sizeof(Floats));
}

using BlockFunction = decltype(&Block<float, 1, 2>);

// c[rows][columns] (+)= a @ b in float32; `columns` is a multiple of 2 * kLanes, rows come in blocks of nearly equal size.
void Multiply(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t columns, float* c,
              int64_t ldc, int64_t depth, bool fresh) {
  // Few rows leave the adders idle unless they take more columns at a time.
  static constexpr BlockFunction kTwo[] = {nullptr,         Block<float, 1, 2>, Block<float, 2, 2>, Block<float, 3, 2>,
                                           Block<float, 4, 2>, Block<float, 5, 2>, Block<float, 6, 2>};
  static constexpr BlockFunction kFour[] = {nullptr, Block<float, 1, 4>, Block<float, 2, 4>, Block<float, 3, 4>};
  int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t j = 0, step; j < columns; j += step) {
    bool four = rows <= 3 && columns - j >= 4 * kLanes;
    step = (four ? 4 : 2) * kLanes;
    for (int64_t block = 0, first = 0, end; block < blocks; ++block, first = end) {
      end = rows * (block + 1) / blocks;
      (four ? kFour : kTwo)[end - first](a + first * lda, lda, b + j, ldb, c + first * ldc + j, ldc, depth, fresh, nullptr,
                                         nullptr);
    }
  }
}

// ---- products of bfloat16 by AVX-512 BF16 --------------------------------------------------------------------

// VDPBF16PS adds two products to each sum: first that of the upper halves of the lanes, then that of the lower ones,
// each as a fused multiply-add rounds it, and flushes denormals. With k in the upper half and k + 1 in the lower one it
// is the chain of the other functions, bit for bit.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool kHasDots = true;
constexpr int kDotRows = 12;    // with two sums each, and two vectors of the weight, they fill 32 registers
constexpr int kDotColumns = 32;

// pairs[i] = x[2 i] in the upper half, x[2 i + 1] in the lower one.
void SwapPairs(const void* x, uint32_t* pairs, int64_t count) {
  auto from = static_cast<const uint32_t*>(x);
  for (int64_t i = 0; i < count; ++i) pairs[i] = from[i] << 16 | from[i] >> 16;
}

// c[kRows][kDotColumns] (+)= a @ b over 2 * pairs values of k. Within a row of c the columns lie as the unpacking of the
// weight leaves them, and in their own order after the last block of k.
template <int kRows>
void DotBlock(const uint32_t* a, int64_t lda, const BFloat16* b, int64_t ldb, __mmask32 columns, float* c, int64_t ldc,
              int64_t pairs, bool fresh, bool last, Ahead* ahead) {
  __m512 sum[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) sum[r][v] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * ldc + 16 * v);
  for (int64_t i = 0; i < pairs; ++i, b += 2 * ldb) {
    __m512i upper = _mm512_maskz_loadu_epi16(columns, b), lower = _mm512_maskz_loadu_epi16(columns, b + ldb);
    __m512bh weight[2] = {(__m512bh)_mm512_unpacklo_epi16(lower, upper), (__m512bh)_mm512_unpackhi_epi16(lower, upper)};
    if (ahead) ahead->Fetch(), ahead->Fetch();
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      __m512bh x = (__m512bh)_mm512_set1_epi32(a[r * lda + i]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], weight[v], x);
    }
  }
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    __m512 low = sum[r][0], high = sum[r][1];
    _mm512_storeu_ps(c + r * ldc, last ? _mm512_permutex2var_ps(low, first, high) : low);
    _mm512_storeu_ps(c + r * ldc + 16, last ? _mm512_permutex2var_ps(low, second, high) : high);
  }
}

// c[rows][width] (+)= a @ b for any number of rows and columns.
void Dots(int64_t rows, const uint32_t* a, int64_t lda, const void* b, int64_t ldb, int64_t width, float* c, int64_t ldc,
          int64_t pairs, bool fresh, bool last, Ahead* ahead) {
  static constexpr decltype(&DotBlock<1>) kBlocks[] = {
      nullptr,     DotBlock<1>, DotBlock<2>, DotBlock<3>,  DotBlock<4>,  DotBlock<5>, DotBlock<6>,
      DotBlock<7>, DotBlock<8>, DotBlock<9>, DotBlock<10>, DotBlock<11>, DotBlock<12>};
  int64_t blocks = (rows + kDotRows - 1) / kDotRows;
  for (int64_t j = 0; j < width; j += kDotColumns) {
    __mmask32 columns = ~0u >> (kDotColumns - std::min<int64_t>(width - j, kDotColumns));
    for (int64_t block = 0, from = 0, end; block < blocks; ++block, from = end) {
      end = rows * (block + 1) / blocks;
      kBlocks[end - from](a + from * lda, lda, static_cast<const BFloat16*>(b) + j, ldb, columns, c + from * ldc + j, ldc,
                          pairs, fresh, last, block ? nullptr : ahead);
    }
  }
}

// c[kRows][kVectors * 16] = a @ b, where b lies in pairs as `a` does: [pairs][stride].
template <int kRows, int kVectors>
void PairBlock(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t stride, float* c, int64_t ldc, int64_t pairs) {
  __m512 sum[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_setzero_ps();
  for (int64_t i = 0; i < pairs; ++i) {
    __m512bh column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = (__m512bh)_mm512_loadu_si512(b + i * stride + 16 * v);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      __m512bh x = (__m512bh)_mm512_set1_epi32(a[r * lda + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], column[v], x);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(c + r * ldc + 16 * v, sum[r][v]);
}

// c[rows][columns] = a @ b in pairs; `columns` is a multiple of 32.
void PairDots(int64_t rows, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t stride, int64_t columns, float* c,
              int64_t ldc, int64_t pairs) {
  static constexpr decltype(&PairBlock<1, 2>) kTwo[] = {
      nullptr,         PairBlock<1, 2>, PairBlock<2, 2>, PairBlock<3, 2>,  PairBlock<4, 2>,  PairBlock<5, 2>, PairBlock<6, 2>,
      PairBlock<7, 2>, PairBlock<8, 2>, PairBlock<9, 2>, PairBlock<10, 2>, PairBlock<11, 2>, PairBlock<12, 2>};
  static constexpr decltype(&PairBlock<1, 4>) kFour[] = {nullptr,         PairBlock<1, 4>, PairBlock<2, 4>, PairBlock<3, 4>,
                                                         PairBlock<4, 4>, PairBlock<5, 4>, PairBlock<6, 4>};
  int64_t blocks = (rows + kDotRows - 1) / kDotRows;
  for (int64_t j = 0, step; j < columns; j += step) {
    bool four = rows <= 6 && columns - j >= 64;  // few rows leave the adders idle unless they take more columns
    step = four ? 64 : 32;
    for (int64_t block = 0, from = 0, end; block < blocks; ++block, from = end) {
      end = rows * (block + 1) / blocks;
      (four ? kFour : kTwo)[end - from](a + from * lda, lda, b + j, stride, c + from * ldc + j, ldc, pairs);
    }
  }
}
#else
constexpr bool kHasDots = false;
void SwapPairs(const void*, uint32_t*, int64_t) {}
void Dots(int64_t, const uint32_t*, int64_t, const void*, int64_t, int64_t, float*, int64_t, int64_t, bool, bool, Ahead*) {}
void PairDots(int64_t, const uint32_t*, int64_t, const uint32_t*, int64_t, int64_t, float*, int64_t, int64_t) {}
#endif

// ---- numbers of any type -------------------------------------------------------------------------------------

// wide[depth][kStrip] in float32 of the last columns of a weight, zeros behind them.
template <typename T>
void Unpack(const void* weight, int64_t stride, int64_t depth, int64_t columns, float* wide) {
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t j = 0; j < kStrip; j += kLanes) {
      Floats x = Wide(static_cast<const T*>(weight) + k * stride + j, columns - j);
      std::memcpy(wide + k * kStrip + j, &x, sizeof x);
    }
}

template <typename T>
void Widen(const void* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats x = Wide(static_cast<const T*>(from) + i, count - i);
    std::memcpy(to + i, &x, std::min<int64_t>(count - i, kLanes) * sizeof(float));
  }
}

template <typename T>
void Narrow(const float* from, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) Narrow(from[i], static_cast<T*>(to) + i);
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Rows to columns by log2(kLanes) perfect shuffles of rows i and i + kLanes / 2.
inline void Transpose(Floats (&x)[kLanes]) {
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Floats y[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      Floats a = x[i], b = x[i + kLanes / 2];
#if defined(__AVX512F__)
      y[2 * i] = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      y[2 * i + 1] = SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
      y[2 * i] = SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      y[2 * i + 1] = SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
    }
    std::memcpy(x, y, sizeof x);
  }
}

constexpr int64_t kBlock = 64;  // keys folded at once, counted from position 0

// wide[head_dim][kBlock]: keys as columns; columns behind the last key are zeros up to a whole vector, then junk.
template <typename T>
void UnpackKeys(const void* const* rows, int64_t count, int64_t head_dim, float* wide) {
  for (int64_t key = 0; key < count; key += kLanes)
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Floats x[kLanes];
      for (int i = 0; i < kLanes; ++i)
        x[i] = key + i < count ? Wide(static_cast<const T*>(rows[key + i]) + d, head_dim - d) : Floats{};
      Transpose(x);
      for (int i = 0; i < kLanes && d + i < head_dim; ++i)
        std::memcpy(wide + (d + i) * kBlock + key, &x[i], sizeof(Floats));
    }
}

// pairs[head_dim / 2][kBlock]: keys of bfloat16 as columns of swapped pairs, for head_dims of whole vectors; columns
// behind the last key are as above.
void UnpackKeyPairs(const void* const* rows, int64_t count, int64_t head_dim, uint32_t* pairs) {
  for (int64_t key = 0; key < count; key += kLanes)
    for (int64_t d = 0; d < head_dim / 2; d += kLanes) {
      Floats x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        Words both = {};
        if (key + i < count) std::memcpy(&both, static_cast<const uint32_t*>(rows[key + i]) + d, sizeof both);
        x[i] = (Floats)(both << 16 | both >> 16);
      }
      Transpose(x);
      for (int i = 0; i < kLanes; ++i) std::memcpy(pairs + (d + i) * kBlock + key, &x[i], sizeof(Floats));
    }
}

// wide[kBlock][width]: values as rows.
template <typename T>
void UnpackValues(const void* const* rows, int64_t count, int64_t head_dim, float* wide, int64_t width) {
  for (int64_t key = 0; key < count; ++key)
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Floats x = Wide(static_cast<const T*>(rows[key]) + d, head_dim - d);
      std::memcpy(wide + key * width + d, &x, sizeof x);
    }
}

// What depends on how numbers are stored.
struct Type {
  int64_t size;
  decltype(&Widen<float>) widen;
  decltype(&Narrow<float>) narrow;
  BlockFunction one_row, two_rows;
  decltype(&Unpack<float>) unpack;
  decltype(&UnpackKeys<float>) unpack_keys;
  decltype(&UnpackValues<float>) unpack_values;
};

template <typename T>
const Type* Make() {
  static constexpr Type type{sizeof(T),       Widen<T>,  Narrow<T>,     Block<T, 1, 4>,
                             Block<T, 2, 4>,  Unpack<T>, UnpackKeys<T>, UnpackValues<T>};
  return &type;
}

const Type* TypeOf(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::BF16: return Make<BFloat16>();
    case ffi::F16: return Make<Float16>();
    case ffi::F32: return Make<float>();
    default: return nullptr;
  }
}

const char* Bytes(const ffi::AnyBuffer& buffer) { return static_cast<const char*>(buffer.untyped_data()); }

// ---- linear -------------------------------------------------------------------------------------------------

struct LinearShape {
  int64_t tokens, count, depth, columns;
  bool dots;  // x comes in swapped pairs of bfloat16, else in float32

  int64_t block_depth() const { return count <= kFewRows ? kFewDepth : kDepth; }
  int64_t block_columns() const { return count <= kFewRows ? kFewColumns : kColumns; }
};

// Columns first .. first + width - 1 of the product of x, prepared as the shape says. Strip by strip, the first rows
// read the weight as it is stored and leave it in float32 for the others.
void Columns(const float* a, const char* weight, const Type& type, char* out, const Type& out_type,
             const LinearShape& s, int64_t first, int64_t width) {
  static thread_local Scratch wide_strip, result;
  int64_t ldc = s.block_columns();
  float* wide = wide_strip.Get(kDepth * kStrip);
  float* c = result.Get((s.count + 1) * ldc);
  int64_t lead = std::min<int64_t>(s.count, 2), stride = s.columns * type.size;
  int64_t lines = std::max<int64_t>(width * type.size / 64, 1);
  weight += first * type.size;
  for (int64_t k = 0, depth; k < s.depth; k += depth, weight += depth * stride) {
    depth = std::min(s.block_depth(), s.depth - k);
    Ahead ahead{weight + depth * stride, lines, lines, stride - 64 * lines};
    if (s.dots) {
      Dots(s.count, reinterpret_cast<const uint32_t*>(a) + k / 2, s.depth / 2, weight, s.columns, width, c, ldc, depth / 2,
           k == 0, k + depth == s.depth, &ahead);
      continue;
    }
    for (int64_t j = 0; j < width; j += kStrip) {
      const char* strip = weight + j * type.size;
      int64_t done = 0;
      if (j + kStrip > width) {
        type.unpack(strip, s.columns, depth, width - j, wide);
      } else if (lead > 0) {
        BlockFunction block = lead == 1 ? type.one_row : type.two_rows;
        block(a + k, s.depth, strip, s.columns, c + j, ldc, depth, k == 0, s.count > lead ? wide : nullptr, &ahead);
        done = lead;
      }
      Multiply(s.count - done, a + done * s.depth + k, s.depth, wide, kStrip, kStrip, c + done * ldc + j, ldc, depth,
               k == 0);
    }
  }
  std::fill(c + s.count * ldc, c + (s.count + 1) * ldc, 0.0f);
  for (int64_t t = 0; t < s.tokens; ++t)
    out_type.narrow(c + std::min(t, s.count) * ldc, out + (t * s.columns + first) * out_type.size, width);
}

// x [tokens, depth] @ weight [depth, columns] -> out [tokens, columns]; rows from `count` on are zeros.
ffi::Error LinearImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Buffer<ffi::S32> count,
                      ffi::Result<ffi::AnyBuffer> out) {
  const Type *type = TypeOf(weight), *out_type = TypeOf(*out);
  if (!type || !out_type || TypeOf(x) != type)
    return ffi::Error::InvalidArgument("linear: x and weight must be both float32, bfloat16 or float16");
  LinearShape s{x.dimensions()[0], 0, x.dimensions()[1], weight.dimensions()[1], false};
  s.count = std::min<int64_t>(std::max(count.typed_data()[0], 0), s.tokens);
  static thread_local Scratch wide_x;
  float* a = wide_x.Get(s.count * s.depth);
  s.dots = kHasDots && x.element_type() == ffi::BF16 && s.depth % 2 == 0;
  if (s.dots)
    SwapPairs(x.untyped_data(), reinterpret_cast<uint32_t*>(a), s.count * s.depth / 2);
  else
    type->widen(x.untyped_data(), a, s.count * s.depth);
  // Enough pieces for every thread, of whole cache lines.
  int64_t piece = s.columns / (4 * std::max<int64_t>(pool.num_threads(), 1)) / 32 * 32;
  piece = std::min(std::max<int64_t>(piece, 32), s.block_columns());
  ParallelFor(pool, (s.columns + piece - 1) / piece, [&](int64_t index) {
    int64_t first = index * piece, width = std::min(piece, s.columns - first);
    Columns(a, Bytes(weight), *type, const_cast<char*>(Bytes(*out)), *out_type, s, first, width);
  });
  return ffi::Error::Success();
}

// x [tokens, ..., size] -> scale * (x / rms(x)), computed in float32 and rounded before the scale multiplies;
// rows of tokens from `count` on are zeros. XLA's own sum of squares changes its order with the number of rows.
ffi::Error RmsNormImpl(ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::Buffer<ffi::S32> count, float eps,
                       ffi::Result<ffi::AnyBuffer> out) {
  const Type* type = TypeOf(x);
  if (!type || TypeOf(scale) != type) return ffi::Error::InvalidArgument("rms_norm: float32, bfloat16 or float16");
  int64_t size = scale.dimensions()[0], rows = x.element_count() / size;
  int64_t valid = std::min<int64_t>(std::max(count.typed_data()[0], 0), x.dimensions()[0]) * rows / x.dimensions()[0];
  static thread_local Scratch scratch;
  int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
  float *factor = scratch.Get(2 * padded), *row = factor + padded;
  type->widen(scale.untyped_data(), factor, size);
  std::fill(row, row + padded, 0.0f);
  char* to = const_cast<char*>(Bytes(*out));
  for (int64_t r = 0; r < valid; ++r) {
    type->widen(Bytes(x) + r * size * type->size, row, size);
    Floats squares = {};
    for (int64_t i = 0; i < padded; i += kLanes) squares = Wide(row + i) * Wide(row + i) + squares;
    float sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += squares[i];
    float inverse = 1 / std::sqrt(sum / size + eps);
    for (int64_t i = 0; i < size; ++i) row[i] *= inverse;
    type->narrow(row, to + r * size * type->size, size);
    type->widen(to + r * size * type->size, row, size);
    for (int64_t i = 0; i < size; ++i) row[i] *= factor[i];
    type->narrow(row, to + r * size * type->size, size);
  }
  std::memset(to + valid * size * type->size, 0, (rows - valid) * size * type->size);
  return ffi::Error::Success();
}

// ---- paged attention ----------------------------------------------------------------------------------------

constexpr int64_t kTileRows = 16;   // query rows of one sequence that share unpacked keys and values
constexpr float kMasked = -1e30f;   // finite: a block that a row does not see then changes nothing, without a test

struct Shape {
  int64_t tokens, heads, head_dim, num_pages, kv_heads, page_size, max_pages, slots;
  float scale;
  int64_t window;  // 0: none
};

struct Tile { int64_t row, count, slot, start; };

bool IsPadding(int32_t slot, int32_t position, int64_t slots) { return position < 0 || slot < 0 || slot >= slots; }

// Runs of rows that stand behind one another in one sequence; the longest context first, it takes longest.
std::vector<Tile> Tiles(const int32_t* slot, const int32_t* position, int64_t tokens, int64_t slots) {
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < tokens; ++row) {
    if (IsPadding(slot[row], position[row], slots)) continue;
    if (!tiles.empty()) {
      Tile& last = tiles.back();
      if (last.row + last.count == row && last.slot == slot[row] && last.start + last.count == position[row] &&
          last.count < kTileRows) {
        ++last.count;
        continue;
      }
    }
    tiles.push_back({row, 1, slot[row], position[row]});
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& a, const Tile& b) { return a.start + a.count > b.start + b.count; });
  return tiles;
}

// The rows of `count` keys or values of one block, wherever their pages are.
void RowsOf(const char* pages, const Type& type, const Shape& s, const int32_t* table, int64_t side_and_head,
            int64_t first, int64_t count, const void** rows) {
  for (int64_t key = 0; key < count; ++key) {
    int64_t index = std::min((first + key) / s.page_size, s.max_pages - 1), offset = (first + key) % s.page_size;
    int64_t page = std::min<int64_t>(std::max(table[index], 0), s.num_pages - 1);
    int64_t row = (page * 2 * s.kv_heads + side_and_head) * s.page_size + offset;
    rows[key] = pages + row * s.head_dim * type.size;
  }
}

// Scores of one row and block to weights, and the row's running maximum, total and output to what goes with them.
void Softmax(float* scores, int64_t first_seen, int64_t end_seen, int64_t keys, float scale, float* maximum,
             float* total, float* out, int64_t width) {
  for (int64_t key = 0; key < keys; ++key)
    scores[key] = key >= first_seen && key < end_seen ? scores[key] * scale : kMasked;
  Floats most = Splat(*maximum);
  for (int64_t key = 0; key < keys; key += kLanes) most = Max(most, Wide(scores + key));
  float largest = most[0];
  for (int i = 1; i < kLanes; ++i) largest = most[i] > largest ? most[i] : largest;
  Floats sums = {};
  for (int64_t key = 0; key < keys; key += kLanes) {
    Floats weights = Exp(Wide(scores + key) - Splat(largest));
    std::memcpy(scores + key, &weights, sizeof weights);
    sums += weights;
  }
  for (int64_t key = 0; key < keys; ++key)  // in a block that the row does not see at all, e^0 is wrong
    if (key < first_seen || key >= end_seen) scores[key] = 0;
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  if (first_seen >= end_seen) sum = 0;
  float rescale = Exp(Splat(*maximum - largest))[0];
  *maximum = largest;
  *total = *total * rescale + sum;
  if (rescale != 1)
    for (int64_t d = 0; d < width; d += kLanes) {
      Floats x = Wide(out + d) * Splat(rescale);
      std::memcpy(out + d, &x, sizeof x);
    }
}

// One tile and KV head.
void Attend(const Tile& tile, int64_t kv_head, const char* q, const Type& q_type, const char* pages, const Type& type,
            const int32_t* table, const Shape& s, char* out) {
  static thread_local Scratch scratch;
  int64_t group = s.heads / s.kv_heads, rows = tile.count * group;
  int64_t width = (s.head_dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
  float* queries = scratch.Get(rows * (2 * width + kBlock + 2) + kBlock * width);
  float* results = queries + rows * width;
  float* scores = results + rows * width;
  float* wide = scores + rows * kBlock;
  float* maximum = wide + kBlock * width;
  float* total = maximum + rows;
  auto at = [&](int64_t r) {
    return ((tile.row + r / group) * s.heads + kv_head * group + r % group) * s.head_dim * q_type.size;
  };
  bool dots = kHasDots && &q_type == Make<BFloat16>() && &type == &q_type && s.head_dim % (2 * kLanes) == 0;
  auto pairs = reinterpret_cast<uint32_t*>(queries), key_pairs = reinterpret_cast<uint32_t*>(wide);
  for (int64_t r = 0; r < rows; ++r) {
    if (dots)
      SwapPairs(q + at(r), pairs + r * width, s.head_dim / 2);
    else
      q_type.widen(q + at(r), queries + r * width, s.head_dim);
  }
  std::fill(results, results + rows * width, 0.0f);
  std::fill(maximum, maximum + rows, kMasked);
  std::fill(total, total + rows, 0.0f);

  const void* kv[kBlock];
  table += tile.slot * s.max_pages;
  int64_t end = tile.start + tile.count;
  int64_t first = s.window ? std::max<int64_t>(tile.start - s.window + 1, 0) / kBlock * kBlock : 0;
  for (; first < end; first += kBlock) {
    int64_t count = std::min(kBlock, end - first), keys = (count + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    RowsOf(pages, type, s, table, kv_head, first, count, kv);
    if (dots) {
      UnpackKeyPairs(kv, count, s.head_dim, key_pairs);
      PairDots(rows, pairs, width, key_pairs, kBlock, keys, scores, kBlock, s.head_dim / 2);
    } else {
      type.unpack_keys(kv, count, s.head_dim, wide);
      Multiply(rows, queries, width, wide, kBlock, keys, scores, kBlock, s.head_dim, true);
    }
    for (int64_t r = 0; r < rows; ++r) {
      int64_t seen = tile.start + r / group + 1 - first;  // keys of this block up to the row's own position
      int64_t from = s.window ? std::max<int64_t>(seen - s.window, 0) : 0;
      Softmax(scores + r * kBlock, from, std::min(seen, kBlock), keys, s.scale, maximum + r, total + r,
              results + r * width, width);
    }
    RowsOf(pages, type, s, table, s.kv_heads + kv_head, first, count, kv);
    type.unpack_values(kv, count, s.head_dim, wide, width);
    Multiply(rows, scores, kBlock, wide, width, width, results, width, count, false);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* row = results + r * width;
    for (int64_t d = 0; d < s.head_dim; ++d) row[d] = row[d] / total[r] + 0.0f;  // -0 may come from masked values
    q_type.narrow(row, out + at(r), s.head_dim);
  }
}

// q [tokens, heads, head_dim], pages [num_pages, 2, kv_heads, page_size, head_dim], table [slots, max_pages],
// slot and position [tokens] -> out as q; a row whose position is negative gives zeros.
ffi::Error AttentionImpl(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer pages, ffi::Buffer<ffi::S32> table,
                         ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> position, float scale, int64_t window,
                         ffi::Result<ffi::AnyBuffer> out) {
  const Type *q_type = TypeOf(q), *type = TypeOf(pages);
  if (!q_type || !type) return ffi::Error::InvalidArgument("paged_attention: float32, bfloat16 or float16");
  auto qd = q.dimensions(), pd = pages.dimensions(), td = table.dimensions();
  Shape s{qd[0], qd[1], qd[2], pd[0], pd[2], pd[3], td[1], td[0], scale, window};
  std::vector<Tile> tiles = Tiles(slot.typed_data(), position.typed_data(), s.tokens, s.slots);
  int64_t row_bytes = s.heads * s.head_dim * q_type->size;
  char* to = const_cast<char*>(Bytes(*out));
  for (int64_t row = 0; row < s.tokens; ++row)
    if (IsPadding(slot.typed_data()[row], position.typed_data()[row], s.slots))
      std::memset(to + row * row_bytes, 0, row_bytes);
  ParallelFor(pool, tiles.size() * s.kv_heads, [&](int64_t index) {
    Attend(tiles[index / s.kv_heads], index % s.kv_heads, Bytes(q), *q_type, Bytes(pages), *type, table.typed_data(), s,
           to);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveLinear, LinearImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveRmsNorm, RmsNormImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<float>("eps")
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxservePagedAttention, AttentionImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Ret<ffi::AnyBuffer>());
