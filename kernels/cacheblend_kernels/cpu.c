/* What a CPU computes between the products of a step, each in one pass: RMSNorm, RoPE with the write to the pool, attention of one
   row over the paged pool (of many: prefill_attention.h), the gate of an MLP, rounding of activations to 8 bits. Called through ctypes
   (compiled.py) on contiguous arrays, without Python's lock. Sums do not depend on the number of threads or of other rows.

   Vectors have LANES floats, as many as a register: a compiler keeps longer ones in memory, and attention then takes ten times as
   long. 16 are AVX-512's; cpu_avx2.c compiles this file with 8, and other processors have 4.

   Each function takes one structure, packed by Python's `struct` in the same order: behind a product, whose weights have displaced
   all else from the CPU's caches, a call costs what it touches. */

#include <math.h>
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
#elif __GNUC__ >= 12 && LANES == 16 /* narrower CPUs load cpu_avx2.c */
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#elif __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#elif LANES == 16 /* no levels yet: the oldest CPUs of both */
#define CLONES __attribute__((target_clones("arch=skylake-avx512", "default")))
#else
#define CLONES __attribute__((target_clones("arch=haswell", "default")))
#endif
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (veci4){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))
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

enum { CHUNK = 256, HEADS = 8, FEW_HEADS = 4, MAX_DIM = 256, AHEAD = 8 };
enum { WIDTH = LANES / 4 }; /* vectors of values that are summed at once for each of FEW_HEADS: as many as there are registers for */
enum { FLOAT32 = 0, BFLOAT16 = 1 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t vecu __attribute__((vector_size(4 * LANES)));
typedef int32_t veci __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t veci4 __attribute__((vector_size(16)));

enum { ABI = 7 }; /* of the functions and structures here, as in compiled.py */
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

/* To the nearest bfloat16, ties to even, as bits of float32. */
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

/* The sums of four vectors. */
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
    for (int i = 1; i < LANES; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most; /* NaN stays: nothing is larger */
    return most;
}

/* e^x for x <= 0, to about 1e-7 of the value; 0 below -87; NaN for NaN. */
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

/* ---- RMSNorm: residual += x where there is a residual; out = norm(residual or x) * weight ---- */

INLINE void norm_row(const void *x, void *residual, const void *weight, void *out, int64_t dim, float eps, int type,
                     int weight_type) {
    vec square[2] = {{0}, {0}};
    for (int64_t i = 0; i < dim; i += LANES) {
        vec v = load(x, i, type);
        if (residual) {
            v = as_type(v + load(residual, i, type), type);
            store(residual, i, v, type);
        }
        square[i / LANES & 1] += v * v;
    }
    const vec factor = splat(1.f / sqrtf(sum(square[0] + square[1]) / (float)dim + eps));
    const void *source = residual ? residual : x;
    for (int64_t i = 0; i < dim; i += LANES) {
        vec v = load(source, i, type) * factor;
        if (type == weight_type) v = as_type(v, type);
        store(out, i, v * load(weight, i, weight_type), type);
    }
}

CLONES static void norm_rows(const char *x, char *residual, const void *weight, char *out, int64_t first, int64_t last,
                             int64_t dim, float eps, int type, int weight_type) {
    const int64_t size = dim * (type == FLOAT32 ? 4 : 2);
    for (int64_t row = first; row < last; row++) {
        const char *source = x + row * size;
        char *sum_to = residual ? residual + row * size : 0, *to = out + row * size;
        if (type == FLOAT32)
            norm_row(source, sum_to, weight, to, dim, eps, FLOAT32, FLOAT32);
        else if (weight_type == FLOAT32)
            norm_row(source, sum_to, weight, to, dim, eps, BFLOAT16, FLOAT32);
        else
            norm_row(source, sum_to, weight, to, dim, eps, BFLOAT16, BFLOAT16);
    }
}

typedef struct {
    const void *x;
    void *residual; /* may be missing */
    const void *weight;
    void *out;
    int64_t rows, dim;
    float eps;
    int32_t type, weight_type, threads;
} Norm;

void cb_rms_norm(const Norm *n) {
    const int64_t each = (n->rows + n->threads - 1) / n->threads;
#pragma omp parallel for num_threads(n->threads) if (n->threads > 1)
    for (int part = 0; part < n->threads; part++) {
        const int64_t first = part * each, last = first + each < n->rows ? first + each : n->rows;
        if (first < last) norm_rows(n->x, n->residual, n->weight, n->out, first, last, n->dim, n->eps, n->type, n->weight_type);
    }
}

/* ---- silu(gate) * up, both rounded; rows are [gate, up] ---- */

INLINE void gate_row(const void *x, void *out, int64_t dim, int type) {
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec gate = load(x, i, type), e = exponential((vec)((vecu)gate | 0x80000000u)); /* e^-|gate| */
        const vec silu = gate * where(gate < 0, e, splat(1.f)) / (1.f + e);
        store(out, i, as_type(silu, type) * load(x, dim + i, type), type);
    }
}

CLONES static void gate_rows(const char *x, char *out, int64_t first, int64_t last, int64_t dim, int type) {
    for (int64_t row = first; row < last; row++)
        if (type == FLOAT32)
            gate_row(x + row * dim * 8, out + row * dim * 4, dim, FLOAT32);
        else
            gate_row(x + row * dim * 4, out + row * dim * 2, dim, BFLOAT16);
}

typedef struct {
    const void *x;
    void *out;
    int64_t rows, dim; /* dim: of a row of out, half of x's */
    int32_t type, threads;
} Gate;

void cb_silu_and_mul(const Gate *g) {
    const int64_t each = (g->rows + g->threads - 1) / g->threads;
#pragma omp parallel for num_threads(g->threads) if (g->threads > 1)
    for (int part = 0; part < g->threads; part++) {
        const int64_t first = part * each, last = first + each < g->rows ? first + each : g->rows;
        if (first < last) gate_rows(g->x, g->out, first, last, g->dim, g->type);
    }
}

/* ---- Rounding of rows to 8 bits: x = (out - 128) * scale, scale of the type that the product is given in ---- */

INLINE void round_row(const void *x, uint8_t *out, void *scale, int64_t row, int64_t dim, int type, int scale_type) {
    vec most = {0};
    veci nan = {0}; /* a maximum passes NaN over */
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec v = load(x, i, type);
        most = larger((vec)((vecu)v & 0x7fffffffu), most);
        nan |= v != v;
    }
    const float value = largest(where(nan, splat(NAN), most));
    const vec by = as_type(splat((value < 1e-12f ? 1e-12f : value) / 127.f), scale_type);
    if (scale_type == FLOAT32)
        ((float *)scale)[row] = by[0];
    else
        ((uint16_t *)scale)[row] = (uint16_t)(((vecu)by)[0] >> 16);
    for (int64_t i = 0; i < dim; i += LANES) {
        bytes whole = __builtin_convertvector(__builtin_convertvector(load(x, i, type) / by + 128.5f, veci), bytes);
        memcpy(out + i, &whole, sizeof whole);
    }
}

CLONES static void round_rows(const char *x, uint8_t *out, void *scale, int64_t first, int64_t last, int64_t dim,
                              int type, int scale_type) {
    for (int64_t row = first; row < last; row++) {
        if (type == FLOAT32)
            round_row(x + row * dim * 4, out + row * dim, scale, row, dim, FLOAT32, scale_type);
        else
            round_row(x + row * dim * 2, out + row * dim, scale, row, dim, BFLOAT16, scale_type);
    }
}

typedef struct {
    const void *x;
    uint8_t *out;
    void *scale;
    int64_t rows, dim;
    int32_t type, scale_type, threads;
} Rounding;

void cb_round_rows(const Rounding *r) {
    const int64_t each = (r->rows + r->threads - 1) / r->threads;
#pragma omp parallel for num_threads(r->threads) if (r->threads > 1)
    for (int part = 0; part < r->threads; part++) {
        const int64_t first = part * each, last = first + each < r->rows ? first + each : r->rows;
        if (first < last) round_rows(r->x, r->out, r->scale, first, last, r->dim, r->type, r->scale_type);
    }
}

/* ---- Products of few rows with weights as oneDNN packs them, which are read once ---- */

enum { OUTPUTS = 64, MOST_ROWS = 4 };

typedef struct {
    const void *x;       /* [rows, in] */
    const char *weight;  /* of x's type or int8: [outputs / 64, words, 64], words of the 1, 2 or 4 values in 32 bits */
    const float *scales; /* [outputs], of int8 weights; else missing */
    const void *bias;    /* [outputs]; may be missing */
    void *out;           /* [rows, outputs] */
    void *by;            /* set here, as words and chain: scales of rows that are rounded to 8 bits */
    int64_t rows, in, outputs, words, chain;
    int32_t type, threads;
} Product;

#ifdef PRODUCTS
/* A sum of products; of int8, as by oneDNN and torch behind it, times the weight's scale, times the row's, each rounded. */
INLINE void finish(const Product *p, int64_t row, int64_t at, vec y) {
    if (p->scales) {
        y = as_type(y * load(p->scales, at, FLOAT32), p->type);
        y = as_type(y * value_at(p->by, row, p->type), p->type);
        __asm__("" : "+v"(y)); /* not fused with the bias */
    }
    if (p->bias) y += load(p->bias, at, p->type);
    store(p->out, row * p->outputs + at, y, p->type);
}

/* NAME(p, first, last): blocks of 64 outputs, of which `width` vectors at once for so many rows: their sums are to stay in registers.
   STEP adds the products of a word of x and of LANES outputs. Sums are made in oneDNN's order: `chain` words, then the next ones apart.
   ROUNDED: rows of 8 bits have 128 for 0, so a row of such zeros is subtracted. */
#define PRODUCT(NAME, FEATURES, ROUNDED, STEP)                                                                                 \
    FEATURES INLINE void NAME##_rows(const Product *p, int64_t at, const int rows, const int width) {                          \
        const char *weight = p->weight + at / OUTPUTS * p->words * 4 * OUTPUTS + at % OUTPUTS * 4, *x = p->x;                  \
        vec totals[MOST_ROWS][OUTPUTS / LANES] = {{{0}}};                                                                      \
        for (int64_t first = 0; first < p->words; first += p->chain) {                                                         \
            const int64_t last = first + p->chain < p->words ? first + p->chain : p->words;                                    \
            vec sums[MOST_ROWS + 1][OUTPUTS / LANES] = {{{0}}};                                                                \
            for (int64_t k = first; k < last; k++, weight += 4 * OUTPUTS)                                                      \
                _Pragma("GCC unroll 8") for (int i = 0; i < width; i++) {                                                      \
                    const vec w = load(weight, i * LANES, FLOAT32);                                                            \
                    _Pragma("GCC unroll 5") for (int row = 0; row < rows + ROUNDED; row++) {                                   \
                        uint32_t values = 0x80808080u;                                                                         \
                        if (row < rows) memcpy(&values, x + (row * p->words + k) * 4, 4);                                      \
                        sums[row][i] = STEP(sums[row][i], (vec)(values - (vecu){0}), w);                                       \
                    }                                                                                                          \
                }                                                                                                              \
            for (int i = 0; i < width; i++)                                                                                    \
                for (int row = 0; row < rows; row++)                                                                           \
                    totals[row][i] += ROUNDED ? __builtin_convertvector((veci)sums[row][i] - (veci)sums[rows][i], vec)         \
                                              : sums[row][i];                                                                  \
        }                                                                                                                      \
        for (int i = 0; i < width; i++)                                                                                        \
            for (int row = 0; row < rows; row++) finish(p, row, at + i * LANES, totals[row][i]);                               \
    }                                                                                                                          \
    FEATURES static void NAME(const Product *p, int64_t first, int64_t last) {                                                 \
        const int all = OUTPUTS / LANES, half = LANES == 16 ? all : all / 2;                                                   \
        first *= OUTPUTS, last *= OUTPUTS;                                                                                     \
        if (p->rows == 1)                                                                                                      \
            for (int64_t at = first; at < last; at += all * LANES) NAME##_rows(p, at, 1, all);                                 \
        else if (p->rows == 2)                                                                                                 \
            for (int64_t at = first; at < last; at += half * LANES) NAME##_rows(p, at, 2, half);                               \
        else if (p->rows == 3)                                                                                                 \
            for (int64_t at = first; at < last; at += half * LANES) NAME##_rows(p, at, 3, half);                               \
        else                                                                                                                   \
            for (int64_t at = first; at < last; at += half * LANES) NAME##_rows(p, at, MOST_ROWS, half);                       \
    }
#ifdef AVX512
#define ADD_FLOAT32(sum, x, w) (vec)_mm512_fmadd_ps((__m512)(x), (__m512)(w), (__m512)(sum))
#define ADD_BFLOAT16(sum, x, w) (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(w))
#define ADD_INT8(sum, x, w) (vec)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(x), (__m512i)(w))
PRODUCT(product_float32, AVX512(""), 0, ADD_FLOAT32)
PRODUCT(product_bfloat16, AVX512(",avx512bf16"), 0, ADD_BFLOAT16)
PRODUCT(product_int8, AVX512(",avx512vnni"), 1, ADD_INT8)
#else
#define ADD_FLOAT32(sum, x, w) (vec)_mm256_fmadd_ps((__m256)(x), (__m256)(w), (__m256)(sum))
PRODUCT(product_float32, __attribute__((target("avx2,fma"))), 0, ADD_FLOAT32)
#endif
#endif

/* 1 without memory, or on a CPU without the instructions for that type. */
int cb_product(const Product *given) {
#ifdef PRODUCTS
    Product own = *given, *p = &own;
    void (*multiply)(const Product *, int64_t, int64_t) = 0;
    uint8_t *rounded = 0;
    const int values = p->type == FLOAT32 ? 1 : 2;
    p->words = p->in / values;
    p->chain = (LANES == 16 && p->in <= 1024 ? 512 : 1024) / values;
#ifdef AVX512
    if (p->scales && __builtin_cpu_supports("avx512vnni")) {
        if (!(rounded = malloc(p->rows * (p->in + 4)))) return 1;
        p->by = rounded + p->rows * p->in;
        round_rows(p->x, rounded, p->by, 0, p->rows, p->in, p->type, p->type);
        p->x = rounded;
        p->words = p->chain = p->in / 4;
        multiply = product_int8;
    } else if (!p->scales) {
        if (p->type == FLOAT32 && __builtin_cpu_supports("avx512dq")) multiply = product_float32;
        if (p->type == BFLOAT16 && __builtin_cpu_supports("avx512bf16")) multiply = product_bfloat16;
    }
#else
    if (!p->scales && p->type == FLOAT32 && __builtin_cpu_supports("fma")) multiply = product_float32;
#endif
    if (!multiply) return 1;
    const int64_t blocks = p->outputs / OUTPUTS, each = (blocks + p->threads - 1) / p->threads;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int part = 0; part < p->threads; part++) {
        const int64_t first = part * each, last = first + each < blocks ? first + each : blocks;
        if (first < last) multiply(p, first, last);
    }
    free(rounded);
    return 0;
#else
    return 1;
#endif
}

/* ---- Attention of one row a sequence over the paged pool ---- */

typedef struct {
    const void *q, *k, *v;      /* q: [seqs, heads, dim]; k, v: [blocks, block_size, kv_heads, dim] */
    const int32_t *table, *lens; /* [seqs, max_blocks], [seqs] */
    void *out;                   /* [rows, heads, dim]; those behind the sequences become 0 */
    float *partial; /* set here. [seqs, kv_heads, chunks, group, dim + 2]: sum of values, sum of weights, maximum */
    int64_t rows, seqs, heads, kv_heads, dim, block_size, max_blocks, chunks, window; /* window: 0 for none */
    float scale;
    int32_t type, threads, pairs; /* pairs: set here, whether `logits_of_pairs` takes this */
} Attention;

/* Sums of `width` vectors of values from column j on, by the weights of some heads: in registers over all keys. */
INLINE void weigh_by(const Attention *a, const int64_t *rows, float (*weights)[CHUNK], int64_t count, const int heads, int64_t j,
                     const int width, int64_t dim, float *partial, int type) {
    vec o[FEW_HEADS][WIDTH] = {{{0}}};
    for (int64_t i = 0; i < count; i++) {
        prefetch(a->v, rows[i + AHEAD] + j, type);
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) {
            const vec value = load(a->v, rows[i] + j + w * LANES, type);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) o[h][w] += value * weights[h][i];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) store(partial, h * (dim + 2) + j + w * LANES, o[h][w], FLOAT32);
}

INLINE void weigh(const Attention *a, const int64_t *rows, float (*weights)[CHUNK], int64_t count, int64_t heads, int64_t j,
                  const int width, int64_t dim, float *partial, int type) {
    switch (heads) {
    case 1: weigh_by(a, rows, weights, count, 1, j, width, dim, partial, type); break;
    case 2: weigh_by(a, rows, weights, count, 2, j, width, dim, partial, type); break;
    case 3: weigh_by(a, rows, weights, count, 3, j, width, dim, partial, type); break;
    default: weigh_by(a, rows, weights, count, FEW_HEADS, j, width, dim, partial, type);
    }
}

/* Logits of FEW_HEADS heads; where fewer are live, the last is repeated. */
INLINE void few_logits(const Attention *a, const void *q, const int64_t *rows, float (*weights)[CHUNK], int64_t count,
                       int64_t live, int64_t dim, int type) {
    float own[FEW_HEADS][MAX_DIM] __attribute__((aligned(64)));
    for (int64_t h = 0; h < FEW_HEADS; h++)
        for (int64_t i = 0; i < dim; i += LANES)
            *(vec *)&own[h][i] = load(q, (h < live ? h : live - 1) * dim + i, type) * a->scale;
    for (int64_t i = 0; i < count; i++) {
        prefetch(a->k, rows[i + AHEAD], type);
        vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        for (int64_t j = 0; j < dim; j += LANES) {
            const vec key = load(a->k, rows[i] + j, type);
            s0 += *(vec *)&own[0][j] * key;
            s1 += *(vec *)&own[1][j] * key;
            s2 += *(vec *)&own[2][j] * key;
            s3 += *(vec *)&own[3][j] * key;
        }
        const vec4 logits = sums(s0, s1, s2, s3);
        for (int h = 0; h < FEW_HEADS && h < live; h++) weights[h][i] = logits[h];
    }
}

#ifdef AVX512
/* Logits of up to HEADS heads over bfloat16 keys, LANES at a time: a vector has a pair of channels of each. dim: a multiple of 32. */
AVX512(",avx512bf16")
static void logits_of_pairs(const Attention *a, const uint16_t *q, const int64_t *rows, float (*weights)[CHUNK], int64_t count,
                            int64_t live) {
    const int64_t dim = a->dim;
    for (int64_t i = 0; i < count; i += LANES) {
        __m512 logits[HEADS] = {{0}};
        for (int64_t j = 0; j < dim; j += 2 * LANES) {
            __m512i x[LANES], y[LANES];
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) {
                x[k] = _mm512_loadu_si512((const uint16_t *)a->k + rows[i + k] + j);
                __builtin_prefetch((const uint16_t *)a->k + rows[i + k + LANES] + j);
                __builtin_prefetch((const uint16_t *)a->v + rows[i + k] + j, 0, 2);
            }
#pragma GCC unroll 4
            for (int k = 0; k < LANES; k += 4) { /* 4 x 4 words of 4 keys in each quarter */
                const __m512i lo = _mm512_unpacklo_epi32(x[k], x[k + 1]), hi = _mm512_unpackhi_epi32(x[k], x[k + 1]);
                const __m512i lo2 = _mm512_unpacklo_epi32(x[k + 2], x[k + 3]), hi2 = _mm512_unpackhi_epi32(x[k + 2], x[k + 3]);
                y[k] = _mm512_unpacklo_epi64(lo, lo2);
                y[k + 1] = _mm512_unpackhi_epi64(lo, lo2);
                y[k + 2] = _mm512_unpacklo_epi64(hi, hi2);
                y[k + 3] = _mm512_unpackhi_epi64(hi, hi2);
            }
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) { /* the quarters: word 4 * quarter + k of all keys */
                const __m512i lo = _mm512_shuffle_i32x4(y[k], y[k + 4], 0x44), hi = _mm512_shuffle_i32x4(y[k], y[k + 4], 0xee);
                const __m512i lo2 = _mm512_shuffle_i32x4(y[k + 8], y[k + 12], 0x44);
                const __m512i hi2 = _mm512_shuffle_i32x4(y[k + 8], y[k + 12], 0xee);
                x[k] = _mm512_shuffle_i32x4(lo, lo2, 0x88);
                x[k + 4] = _mm512_shuffle_i32x4(lo, lo2, 0xdd);
                x[k + 8] = _mm512_shuffle_i32x4(hi, hi2, 0x88);
                x[k + 12] = _mm512_shuffle_i32x4(hi, hi2, 0xdd);
            }
#pragma GCC unroll 8
            for (int h = 0; h < HEADS; h++) {
                if (h >= live) break;
#pragma GCC unroll 16
                for (int k = 0; k < LANES; k++) {
                    int32_t pair;
                    memcpy(&pair, q + h * dim + j + 2 * k, sizeof pair);
                    logits[h] = _mm512_dpbf16_ps(logits[h], (__m512bh)x[k], (__m512bh)_mm512_set1_epi32(pair));
                }
            }
        }
        for (int h = 0; h < live; h++) *(vec *)&weights[h][i] = (vec)logits[h] * a->scale;
    }
}
#endif

INLINE void attend(const Attention *a, int64_t seq, int64_t head, int64_t chunk, int64_t dim, int type) {
    const int64_t len = a->lens[seq], group = a->heads / a->kv_heads, stride = a->kv_heads * dim, size = type == FLOAT32 ? 4 : 2;
    const int64_t start = a->window && len > a->window ? len - a->window : 0;
    int64_t first = chunk * CHUNK, last = first + CHUNK < len ? first + CHUNK : len;
    first = first < start ? start : first;
    float *partial = a->partial + ((seq * a->kv_heads + head) * a->chunks + chunk) * group * (dim + 2);
    const int64_t count = last - first;
    if (count <= 0) {
        for (int64_t g = 0; g < group; g++) {
            partial[g * (dim + 2) + dim] = 0;
            partial[g * (dim + 2) + dim + 1] = -INFINITY;
        }
        return;
    }
    int64_t rows[CHUNK + 2 * LANES]; /* the last key's is repeated behind it */
    for (int64_t i = 0; i < count;) {
        const int64_t key = first + i, offset = key % a->block_size;
        int64_t slot = (int64_t)a->table[seq * a->max_blocks + key / a->block_size] * a->block_size + offset;
        for (int64_t left = a->block_size - offset; left && i < count; left--) rows[i++] = slot++ * stride + head * dim;
    }
    for (int64_t i = 0; i < 2 * LANES; i++) rows[count + i] = rows[count - 1];
    for (int64_t g = 0; g < group; g += HEADS) {
        float weights[HEADS][CHUNK] __attribute__((aligned(64)));
        const int64_t live = group - g < HEADS ? group - g : HEADS;
        const char *q = (const char *)a->q + (seq * a->heads + head * group + g) * dim * size;
#ifdef AVX512
        if (a->pairs)
            logits_of_pairs(a, (const uint16_t *)q, rows, weights, count, live);
        else
#endif
            for (int64_t h = 0; h < live; h += FEW_HEADS)
                few_logits(a, q + h * dim * size, rows, weights + h, count, live - h, dim, type);
        const int64_t padded = (count + LANES - 1) / LANES * LANES;
        for (int64_t h = 0; h < live; h++) {
            for (int64_t i = count; i < padded; i++) weights[h][i] = -INFINITY;
            vec most = splat(-INFINITY), total = {0};
            for (int64_t i = 0; i < padded; i += LANES) most = larger(*(vec *)&weights[h][i], most);
            const float top = largest(most), base = top == -INFINITY ? 0 : top; /* NaN is not in top, but in the weights */
            for (int64_t i = 0; i < padded; i += LANES) {
                const vec w = exponential(*(vec *)&weights[h][i] - base);
                *(vec *)&weights[h][i] = w;
                total += w;
            }
            partial[(g + h) * (dim + 2) + dim] = sum(total);
            partial[(g + h) * (dim + 2) + dim + 1] = top;
        }
        for (int64_t h = 0; h < live; h += FEW_HEADS) {
            float *to = partial + (g + h) * (dim + 2);
            int64_t j = 0;
            for (; j + WIDTH * LANES <= dim; j += WIDTH * LANES)
                weigh(a, rows, weights + h, count, live - h, j, WIDTH, dim, to, type);
            for (; j < dim; j += LANES) weigh(a, rows, weights + h, count, live - h, j, 1, dim, to, type);
        }
    }
}

CLONES static void attend_chunk(const Attention *a, int64_t task) {
    const int64_t head = task % a->kv_heads, chunk = task / a->kv_heads % a->chunks, seq = task / a->kv_heads / a->chunks;
    if (a->type == FLOAT32 && a->dim == 64)
        attend(a, seq, head, chunk, 64, FLOAT32);
    else if (a->type == FLOAT32)
        attend(a, seq, head, chunk, a->dim, FLOAT32);
    else if (a->dim == 64)
        attend(a, seq, head, chunk, 64, BFLOAT16);
    else if (a->dim == 128)
        attend(a, seq, head, chunk, 128, BFLOAT16);
    else
        attend(a, seq, head, chunk, a->dim, BFLOAT16);
}

/* Parts of all chunks, in order, as one softmax. Of a chunk without keys to weigh only the sum of weights, 0, is set. */
CLONES static void combine(const Attention *a, int64_t seq, int64_t head) {
    const int64_t group = a->heads / a->kv_heads, dim = a->dim, size = group * (dim + 2);
    const float *parts = a->partial + ((seq * a->kv_heads + head / group) * a->chunks) * size + head % group * (dim + 2);
    if (a->lens[seq] <= 0) {
        for (int64_t j = 0; j < dim; j += LANES) store(a->out, (seq * a->heads + head) * dim + j, (vec){0}, a->type);
        return;
    }
    float top = -INFINITY, total = 0;
    for (int64_t c = 0; c < a->chunks; c++) top = fmaxf(top, parts[c * size + dim + 1]);
    float shares[a->chunks];
    for (int64_t c = 0; c < a->chunks; c++) {
        const float weights = parts[c * size + dim], most = parts[c * size + dim + 1];
        shares[c] = weights == 0 ? 0 : most == -INFINITY ? weights : expf(most - top); /* -inf: all keys are NaN */
        total += weights == 0 ? 0 : shares[c] * weights;
    }
    for (int64_t j = 0; j < dim; j += LANES) {
        vec out = {0};
        for (int64_t c = 0; c < a->chunks; c++)
            if (shares[c] != 0) out += load(parts, c * size + j, FLOAT32) * shares[c];
        store(a->out, (seq * a->heads + head) * dim + j, out / total, a->type);
    }
}

/* 1 without memory. */
int cb_decode_attention(const Attention *given) {
    Attention own = *given, *a = &own;
    const int64_t tasks = a->seqs * a->kv_heads * a->chunks, size = a->heads * a->dim * (a->type == FLOAT32 ? 4 : 2);
#ifdef AVX512
    a->pairs = a->type == BFLOAT16 && a->dim % 32 == 0 && __builtin_cpu_supports("avx512bf16");
#endif
    a->partial = malloc(a->seqs * a->heads * a->chunks * (a->dim + 2) * sizeof(float));
    if (!a->partial && tasks) return 1;
    memset((char *)a->out + a->seqs * size, 0, (a->rows - a->seqs) * size);
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) attend_chunk(a, task);
#pragma omp for
        for (int64_t i = 0; i < a->seqs * a->heads; i++) combine(a, i / a->heads, i % a->heads);
    }
    free(a->partial);
    return 0;
}

/* ---- RoPE of q and K, and K and V into the pool ---- */

typedef struct {
    const void *q, *k, *v;   /* rows of contiguous heads, q_stride or kv_stride values apart; q may be missing */
    const float *cos, *sin;  /* [rows, dim], halves equal */
    const int64_t *slots;    /* [rows] */
    void *q_out, *k_pool, *v_pool; /* [rows, heads, dim], [num_slots, kv_heads, dim] */
    int64_t rows, heads, kv_heads, dim, q_stride, k_stride, v_stride, num_slots;
    int32_t type, threads;
} Rope;

INLINE void put(void *p, int64_t i, float x, int type) {
    union { float x; uint32_t bits; } u = {x};
    if (type == FLOAT32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = x != x ? 0x7fc0 : (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
}

/* The first product is rounded, the second is not: as torch's addcmul has it. */
INLINE void rotate(const void *restrict from, int64_t at, void *restrict to, int64_t out, const float *restrict cos,
                   const float *restrict sin, int64_t heads, int64_t dim, int type) {
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < heads; h++, at += dim, out += dim)
        for (int64_t i = 0; i < half; i++) {
            const float a = value_at(from, at + i, type), b = value_at(from, at + half + i, type);
            put(to, out + i, __builtin_fmaf(-b, sin[i], a * cos[i]), type);
            put(to, out + half + i, __builtin_fmaf(a, sin[i], b * cos[i]), type);
        }
}

INLINE void rotate_rows(const Rope *r, int64_t first, int64_t last, int type) {
    const int64_t size = r->kv_heads * r->dim, width = type == FLOAT32 ? 4 : 2;
    for (int64_t row = first; row < last; row++) {
        const float *cos = r->cos + row * r->dim, *sin = r->sin + row * r->dim;
        if (r->q) rotate(r->q, row * r->q_stride, r->q_out, row * r->heads * r->dim, cos, sin, r->heads, r->dim, type);
        rotate(r->k, row * r->k_stride, r->k_pool, r->slots[row] * size, cos, sin, r->kv_heads, r->dim, type);
        memcpy((char *)r->v_pool + r->slots[row] * size * width, (const char *)r->v + row * r->v_stride * width, size * width);
    }
}

CLONES static void rotate_part(const Rope *r, int64_t first, int64_t last) {
    if (r->type == FLOAT32)
        rotate_rows(r, first, last, FLOAT32);
    else
        rotate_rows(r, first, last, BFLOAT16);
}

/* 1, and nothing is written, where a slot is none of the pool's. */
int cb_rope_and_cache(const Rope *r) {
    for (int64_t row = 0; row < r->rows; row++)
        if (r->slots[row] < 0 || r->slots[row] >= r->num_slots) return 1;
    const int64_t each = (r->rows + r->threads - 1) / r->threads;
#pragma omp parallel for num_threads(r->threads) if (r->threads > 1)
    for (int part = 0; part < r->threads; part++) {
        const int64_t first = part * each, last = first + each < r->rows ? first + each : r->rows;
        if (first < last) rotate_part(r, first, last);
    }
    return 0;
}

/* ---- Stored codes into the pool: unpack, levels, inverse Hadamard, mean, RoPE. The layout is StoredKV's (interface.py) ---- */

enum { MAX_CODES = 1024 };

typedef struct {
    const uint8_t *k, *v;            /* [rows, heads, bytes] */
    const uint16_t *k_scale, *v_scale; /* [rows, heads] bfloat16 */
    const uint16_t *mean;            /* [heads, k_dim] bfloat16 */
    const float *k_levels, *v_levels; /* [2^bits] */
    const float *cos, *sin;          /* [rows, k_dim], halves equal */
    const int64_t *slots;            /* [rows]; not read where first >= 0: slots are then first, first + 1, ... */
    void *k_pool, *v_pool;           /* [num_slots, heads, dim] */
    int64_t rows, heads, k_dim, v_dim, num_slots, first;
    int32_t k_bits, v_bits, type, threads;
} Codes;

INLINE int64_t plane_bytes(int64_t dim, int plane) { return (dim * plane + 7) / 8; }

/* Planes of 4, 2 and 1 bits, as far as a code has them; a code of 8 bits is a byte. */
INLINE int64_t code_bytes(int64_t dim, const int bits) {
    if (bits == 8) return dim;
    return (bits & 4 ? plane_bytes(dim, 4) : 0) + (bits & 2 ? plane_bytes(dim, 2) : 0) + (bits & 1 ? plane_bytes(dim, 1) : 0);
}

/* Codes of a plane, up to 8 beyond dim. */
INLINE void unpack(const uint8_t *restrict p, uint8_t *restrict codes, int64_t dim, const int plane, const int shift) {
    const int64_t n = plane_bytes(dim, plane);
#pragma GCC unroll 8
    for (int part = 0; part < 8 / plane; part++) {
        uint8_t *restrict to = codes + part * n;
        for (int64_t j = 0; j < n; j++) {
            const uint8_t value = (uint8_t)((p[j] >> part * plane & ((1 << plane) - 1)) << shift);
            to[j] = shift ? to[j] | value : value;
        }
    }
}

#ifdef __clang__
#define SHUFFLED(x, pattern) shuffled(x, pattern)
INLINE vec shuffled(vec x, veci pattern) {
    vec y;
    for (int i = 0; i < LANES; i++) y[i] = x[pattern[i] & (LANES - 1)];
    return y;
}
#else
#define SHUFFLED(x, pattern) __builtin_shuffle(x, pattern)
#endif

/* y[i] = levels[codes[i]] * scale */
INLINE void to_levels(const uint8_t *codes, float *y, const float *levels, float scale, int64_t dim, const int bits) {
    if (1 << bits <= LANES) { /* all levels in a register */
        vec table = {0};
        memcpy(&table, levels, sizeof(float) << bits);
        for (int64_t i = 0; i < dim; i += LANES) {
            bytes c;
            memcpy(&c, codes + i, sizeof c);
            *(vec *)(y + i) = SHUFFLED(table, __builtin_convertvector(c, veci)) * scale;
        }
    } else
        for (int64_t i = 0; i < dim; i++) y[i] = levels[codes[i]] * scale;
}

/* Sums and differences of neighbouring runs of `step` values, within a vector. */
INLINE vec butterfly(vec x, const int step) {
    veci pattern, sign;
    for (int i = 0; i < LANES; i++) {
        pattern[i] = i ^ step;
        sign[i] = i & step ? INT32_MIN : 0;
    }
    return (vec)((veci)x ^ sign) + SHUFFLED(x, pattern);
}

/* The transform of a head, see torch_backend.mixed; without its factor. y has room for LANES more values, of which nothing is read. */
INLINE void mix(float *restrict y, int64_t dim) {
    const int64_t half = dim / 2, block = half & -half;
    if (dim % 2) return;
    for (int64_t j = 0; j < half; j++) {
        const float a = y[j], b = y[half + j];
        y[j] = a + b;
        y[half + j] = a - b;
    }
    for (int64_t step = block / 2; step >= LANES; step /= 2)
        for (int64_t i = 0; i < dim; i += 2 * step)
            for (int64_t j = i; j < i + step; j += LANES) {
                const vec a = *(vec *)(y + j), b = *(vec *)(y + j + step);
                *(vec *)(y + j) = a + b;
                *(vec *)(y + j + step) = a - b;
            }
    for (int64_t i = 0; i < dim; i += LANES) {
        vec x = *(vec *)(y + i);
        if (LANES > 8 && block > 8) x = butterfly(x, 8);
        if (LANES > 4 && block > 4) x = butterfly(x, 4);
        if (block > 2) x = butterfly(x, 2);
        if (block > 1) x = butterfly(x, 1);
        *(vec *)(y + i) = x;
    }
}

INLINE void restore(const uint8_t *packed, uint8_t *codes, float *y, const float *levels, float scale, int64_t dim, const int bits) {
    int shift = 0;
    const uint8_t *plane = packed;
    if (bits & 4) {
        unpack(plane, codes, dim, 4, 0);
        plane += plane_bytes(dim, 4);
        shift = 4;
    }
    if (bits & 2) {
        unpack(plane, codes, dim, 2, shift);
        plane += plane_bytes(dim, 2);
        shift += 2;
    }
    if (bits & 1) unpack(plane, codes, dim, 1, shift);
    to_levels(bits == 8 ? packed : codes, y, levels, scale, dim, bits);
    mix(y, dim);
}

INLINE void load_code_rows(const Codes *c, int64_t first, int64_t last, int64_t k_dim, int64_t v_dim, const int k_bits, const int v_bits, const int type) {
    uint8_t codes[MAX_CODES + 64] = {0};
    float y[MAX_CODES + LANES] __attribute__((aligned(64))) = {0};
    const int64_t half = k_dim / 2, k_bytes = code_bytes(k_dim, k_bits), v_bytes = code_bytes(v_dim, v_bits), v_half = v_dim / 2;
    const float k_factor = 1.f / sqrtf((float)(2 * (half & -half))), v_factor = v_dim % 2 ? 1.f : 1.f / sqrtf((float)(2 * (v_half & -v_half)));
    for (int64_t row = first; row < last; row++) {
        const int64_t slot = c->first < 0 ? c->slots[row] : c->first + row;
        const float *cos = c->cos + row * k_dim, *sin = c->sin + row * k_dim;
        for (int64_t head = 0, at = row * c->heads, to = slot * c->heads; head < c->heads; head++, at++, to++) {
            restore(c->k + at * k_bytes, codes, y, c->k_levels, value_at(c->k_scale, at, BFLOAT16) * k_factor, k_dim, k_bits);
            const uint16_t *mean = c->mean + head * k_dim;
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                const vec a = load(y, i, FLOAT32) + load(mean, i, BFLOAT16), b = load(y, half + i, FLOAT32) + load(mean, half + i, BFLOAT16);
                const vec x = load(cos, i, FLOAT32), z = load(sin, i, FLOAT32);
                store(c->k_pool, to * k_dim + i, a * x - b * z, type);
                store(c->k_pool, to * k_dim + half + i, b * x + a * z, type);
            }
            for (; i < half; i++) {
                const float a = y[i] + value_at(mean, i, BFLOAT16), b = y[half + i] + value_at(mean, half + i, BFLOAT16);
                put(c->k_pool, to * k_dim + i, a * cos[i] - b * sin[i], type);
                put(c->k_pool, to * k_dim + half + i, b * cos[i] + a * sin[i], type);
            }
            restore(c->v + at * v_bytes, codes, y, c->v_levels, value_at(c->v_scale, at, BFLOAT16) * v_factor, v_dim, v_bits);
            for (i = 0; i + LANES <= v_dim; i += LANES) store(c->v_pool, to * v_dim + i, *(vec *)(y + i), type);
            for (; i < v_dim; i++) put(c->v_pool, to * v_dim + i, y[i], type);
        }
    }
}

/* of_latents: as many bits for K as for V, which latent attention has, whose widths are none of those. */
INLINE void load_code_part(const Codes *c, int64_t first, int64_t last, const int k_bits, const int v_bits, const int of_latents, const int type) {
    if (!of_latents && c->k_dim == 64 && c->v_dim == 64)
        load_code_rows(c, first, last, 64, 64, k_bits, v_bits, type);
    else if (!of_latents && c->k_dim == 128 && c->v_dim == 128)
        load_code_rows(c, first, last, 128, 128, k_bits, v_bits, type);
    else
        load_code_rows(c, first, last, c->k_dim, c->v_dim, k_bits, v_bits, type);
}

#define LOAD_CODES(K_BITS, V_BITS, OF_LATENTS)                                                                 \
    CLONES static void load_codes_##K_BITS##V_BITS(const Codes *c, int64_t first, int64_t last) {              \
        if (c->type == FLOAT32)                                                                                \
            load_code_part(c, first, last, K_BITS, V_BITS, OF_LATENTS, FLOAT32);                                           \
        else                                                                                                   \
            load_code_part(c, first, last, K_BITS, V_BITS, OF_LATENTS, BFLOAT16);                                          \
    }
LOAD_CODES(8, 8, 0)
LOAD_CODES(7, 6, 0)
LOAD_CODES(7, 5, 0)
LOAD_CODES(5, 3, 0)
LOAD_CODES(7, 7, 1)
LOAD_CODES(6, 6, 1)
LOAD_CODES(4, 4, 1)
LOAD_CODES(3, 3, 0)

typedef void (*Loading)(const Codes *, int64_t, int64_t);

static Loading loading(const Codes *c) {
    switch (10 * c->k_bits + c->v_bits) {
    case 88: return load_codes_88;
    case 77: return load_codes_77;
    case 76: return load_codes_76;
    case 75: return load_codes_75;
    case 66: return load_codes_66;
    case 53: return load_codes_53;
    case 44: return load_codes_44;
    case 33: return load_codes_33;
    default: return 0;
    }
}

/* 1, and nothing is written, where a slot is none of the pool's; 2 for bits that no codec has. */
int cb_load_codes(const Codes *c) {
    const Loading load = loading(c);
    if (!load) return 2;
    if (c->first >= 0 && c->first + c->rows > c->num_slots) return 1;
    for (int64_t row = 0; c->first < 0 && row < c->rows; row++)
        if (c->slots[row] < 0 || c->slots[row] >= c->num_slots) return 1;
    const int64_t each = (c->rows + c->threads - 1) / c->threads;
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1)
    for (int part = 0; part < c->threads; part++) {
        const int64_t first = part * each, last = first + each < c->rows ? first + each : c->rows;
        if (first < last) load(c, first, last);
    }
    return 0;
}

#include "prefill_attention.h"
#include "gguf_blocks.h"
