/* Vectors of LANES floats: loads and stores in float32 or bfloat16, sums, maxima, e^x. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifndef LANES
#ifdef __x86_64__
#define LANES 16
#else
#define LANES 4
#endif
#endif

#if !defined(__x86_64__) || !defined(__gnu_linux__) || defined(__clang__)
#define CLONES
#elif __GNUC__ >= 12 && LANES == 16 /* CPUs without AVX-512 load cpu_avx2.c */
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#elif __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#elif LANES == 16 /* older GCC lacks x86-64 levels: name the oldest CPUs with the instructions */
#define CLONES __attribute__((target_clones("arch=skylake-avx512", "default")))
#else
#define CLONES __attribute__((target_clones("arch=haswell", "default")))
#endif
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (veci4){__VA_ARGS__})
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (veci){__VA_ARGS__})
#endif
/* Interleave the first or the last halves of two vectors of LANES floats. */
#if LANES == 16
#define ZIP_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define ZIP_LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define ZIP_LOW(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#endif
#define INLINE static inline __attribute__((always_inline))
/* Run `call`, an expression in first and last, on parts of 0..count - 1, one per thread. */
#define IN_PARTS(count, threads, call)                                                              \
    do {                                                                                            \
        const int parts_ = threads;                                                                 \
        const int64_t all_ = count, each_ = (all_ + parts_ - 1) / parts_;                           \
        _Pragma("omp parallel for num_threads(parts_) if (parts_ > 1)")                             \
        for (int part_ = 0; part_ < parts_; part_++) {                                              \
            const int64_t first = part_ * each_, last = first + each_ < all_ ? first + each_ : all_; \
            if (first < last) call;                                                                 \
        }                                                                                           \
    } while (0)
#if LANES > 4 && defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 10
#include <immintrin.h>
#define PRODUCTS
#if LANES == 16
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#define AVX512(more) __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq" more)))
#endif
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t vecu __attribute__((vector_size(4 * LANES)));
typedef int32_t veci __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int16_t signed_halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t veci4 __attribute__((vector_size(16)));

enum { ABI = 10 }; /* version of the functions and structures, as in compiled.py */
const int32_t cb_abi = ABI;

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec load(const void *p, int64_t i, int type) {
    if (type == FLOAT32) {
        vec x;
        memcpy(&x, (const float *)p + i, sizeof x);
        return x;
    }
    halves h;
    memcpy(&h, (const uint16_t *)p + i, sizeof h);
    return (vec)(__builtin_convertvector(h, vecu) << 16);
}

/* Round to the nearest bfloat16, ties to even. Returns bits of float32. */
INLINE vecu rounded(vec x) {
    vecu bits = (vecu)x, nan = (vecu)(x != x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return (nan & 0x7fc00000u) | (~nan & bits);
}

INLINE float value_at(const void *p, int64_t i, int type) {
    if (type == FLOAT32) return ((const float *)p)[i];
    union { uint32_t bits; float x; } u = {(uint32_t)((const uint16_t *)p)[i] << 16};
    return u.x;
}

INLINE void prefetch(const void *p, int64_t i, int type) {
    __builtin_prefetch((const char *)p + i * (type == FLOAT32 ? 4 : 2));
    __builtin_prefetch((const char *)p + i * (type == FLOAT32 ? 4 : 2) + 64);
}

INLINE void store(void *p, int64_t i, vec x, int type) {
    if (type == FLOAT32) {
        memcpy((float *)p + i, &x, sizeof x);
        return;
    }
    halves h = __builtin_convertvector(rounded(x) >> 16, halves);
    memcpy((uint16_t *)p + i, &h, sizeof h);
}

INLINE vec as_type(vec x, int type) { return type == FLOAT32 ? x : (vec)rounded(x); }

INLINE vec4 quarter(vec x) {
#if LANES == 16
    union { vec whole; vec8 part[2]; } a = {x};
    union { vec8 whole; vec4 part[2]; } b = {a.part[0] + a.part[1]};
    return b.part[0] + b.part[1];
#elif LANES == 8
    union { vec whole; vec4 part[2]; } a = {x};
    return a.part[0] + a.part[1];
#else
    return x;
#endif
}

/* Return the sum of each of four vectors. */
INLINE vec4 sums(vec a, vec b, vec c, vec d) {
    vec4 w = quarter(a), x = quarter(b), y = quarter(c), z = quarter(d);
    vec4 ab = PICK(w, x, 0, 1, 4, 5) + PICK(w, x, 2, 3, 6, 7);
    vec4 cd = PICK(y, z, 0, 1, 4, 5) + PICK(y, z, 2, 3, 6, 7);
    return PICK(ab, cd, 0, 2, 4, 6) + PICK(ab, cd, 1, 3, 5, 7);
}

INLINE float sum(vec x) {
    vec4 q = quarter(x);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

INLINE vec where(veci mask, vec a, vec b) { return (vec)((mask & (veci)a) | (~mask & (veci)b)); }

INLINE vec larger(vec a, vec b) { return where(a > b, a, b); }

INLINE float largest(vec x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most; /* NaN is kept */
    return most;
}

/* e^x for x <= 0 with a relative error of about 1e-7; 0 below -87; NaN for NaN. */
INLINE vec exponential(vec x) {
    const vec magic = splat(12582912.f);
    vec turns = x * 1.44269504f + magic, n = turns - magic;
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.f;
    vec scaled = (vec)((veci)y + (((veci)turns - (veci)magic) << 23));
    return where(x != x, x, where(x < -87.f, (vec){0}, scaled));
}

INLINE void put(void *p, int64_t i, float x, int type) {
    union { float x; uint32_t bits; } u = {x};
    if (type == FLOAT32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = x != x ? 0x7fc0 : (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
}
