/* Products of up to MOST_ROWS rows with weights in oneDNN's packed layout. Each weight is read once. */

enum { OUTPUTS = 64, MOST_ROWS = 4 };

typedef struct {
    const void *x;       /* [rows, in] */
    const char *weight;  /* x's type or int8: [outputs / 64, words, 64]; a word of 32 bits has 1, 2 or 4 values */
    const float *scales; /* [outputs] for int8 weights, else null */
    const void *bias;    /* [outputs]; may be null */
    void *out;           /* [rows, outputs] */
    void *by;            /* scales of rows rounded to 8 bits; by, words and chain are set here */
    int64_t rows, in, outputs, words, chain;
    int32_t type, threads;
} Product;

#ifdef PRODUCTS
/* Store sums y of a row from output `at` on. int8: times the weights' scales, then the row's, rounded after each, as oneDNN and torch
   do. */
INLINE void finish(const Product *p, int64_t row, int64_t at, vec y) {
    if (p->scales) {
        y = as_type(y * load(p->scales, at, FLOAT32), p->type);
        y = as_type(y * value_at(p->by, row, p->type), p->type);
        __asm__("" : "+v"(y)); /* no fused multiply-add with the bias */
    }
    if (p->bias) y += load(p->bias, at, p->type);
    store(p->out, row * p->outputs + at, y, p->type);
}

/* Define NAME(p, first, last), which computes blocks first..last-1 of 64 outputs: `width` vectors at a time, so that the sums of all
   rows stay in registers. STEP adds the products of one word of x with LANES outputs. The order of sums is oneDNN's: `chain` words are
   summed apart, then added to the total. ROUNDED: rows of 8 bits store 0 as 128, so the product with a row of 128s is subtracted. */
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

/* Return 1 if memory is short or the CPU lacks the instructions for this type. */
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
    IN_PARTS(p->outputs / OUTPUTS, p->threads, multiply(p, first, last));
    free(rounded);
    return 0;
#else
    return 1;
#endif
}
