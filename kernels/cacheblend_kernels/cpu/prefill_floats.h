/* Products of many rows with a tile of weights, in floats or bfloat16: x is packed once, a row per lane, and weights are read value by
   value. The sum of a result adds one word (a float, or a pair of bfloat16) after the other, so it is the same to the bit whatever rows
   are computed with it. */

enum { TILE = LANES == 16 ? 192 : 96, DEPTH = 256, STRIDE = DEPTH + 16, BLOCK = 2 * LANES, MOST_ROWS_AT_ONCE = 1024 };
/* most outputs of a tile; words of scratch per output, and from one output to the next; rows in a block of packed x; rows per pass */
/* ways to multiply; with integers, plain numbers are multiplied as floats */
enum { FLOATS = 0, PAIRS_OF_BFLOAT16 = 1, MATRICES_OF_BFLOAT16 = 2, INTEGERS = 3, INTEGERS_BY_VNNI = 4 };

typedef struct {
    const void *x;              /* [num_rows, width] */
    const uint8_t *const *rows; /* address of each output's weights */
    const uint8_t *kinds;       /* type of each output's weights */
    const void *bias;           /* [outputs]; may be null */
    void *out;                  /* [num_rows, outputs], or half as wide if gated */
    int64_t num_rows, width, outputs;
    float factor;               /* of the product */
    int32_t type, threads, way; /* type: of x, bias and out */
    int32_t gated;              /* out is silu(first half of the outputs) * second half; outputs: a multiple of 2 * LANES */
} PrefillProduct;

/* Return the outputs of a tile. Packed x is read once a tile, but each thread should have several. */
INLINE int64_t tile_of(const PrefillProduct *p) { return LANES < 16 || p->outputs >= 4 * TILE * p->threads ? TILE : TILE / 2; }

/* Return the row of weights of a tile's output. Half a tile of a gated product are gates, the other half their factors. */
INLINE int64_t weights_of(const PrefillProduct *p, int64_t output) {
    const int64_t size = tile_of(p), tile = output / size * size, left = p->outputs - tile, half = (left < size ? left : size) / 2;
    if (!p->gated) return output;
    return output - tile < half ? output - tile / 2 : output - tile / 2 - half + p->outputs / 2;
}

INLINE int in_bfloat16(int way) { return way == PAIRS_OF_BFLOAT16 || way == MATRICES_OF_BFLOAT16; }

struct RoundedRows;

typedef struct {
    float *packed;               /* words [blocks, words, BLOCK], if some weights are plain numbers */
    struct RoundedRows *rounded; /* [blocks, groups], if some are multiplied in integers */
    int64_t first_row, rows, blocks, words, groups;
} Packed;

/* Transpose LANES vectors in place. */
INLINE void transpose(vec a[LANES]) {
    for (int round = 1; round < LANES; round *= 2) {
        vec b[LANES];
        _Pragma("GCC unroll 8") for (int i = 0; i < LANES / 2; i++) {
            const vec x = a[i], y = a[i + LANES / 2];
            b[2 * i] = (vec)ZIP_LOW(x, y);
            b[2 * i + 1] = (vec)ZIP_HIGH(x, y);
        }
        memcpy(a, b, sizeof b);
    }
}

/* Pack a block of rows: [words, BLOCK], zeros after the last row. */
INLINE void pack_block(const PrefillProduct *p, const Packed *packed, int64_t block, const int pairs) {
    float *to = packed->packed + block * packed->words * BLOCK;
    for (int64_t half = 0; half < BLOCK; half += LANES) {
        const int64_t at = block * BLOCK + half, left = packed->rows - at, count = left < 0 ? 0 : left < LANES ? left : LANES;
        for (int64_t k = 0; k < packed->words; k += LANES) {
            vec words[LANES] = {{0}};
            for (int64_t row = 0; row < count; row++) {
                const int64_t start = (packed->first_row + at + row) * p->width;
                words[row] = pairs ? load((const uint16_t *)p->x + start + 2 * k, 0, FLOAT32) : load(p->x, start + k, p->type);
            }
            transpose(words);
            for (int i = 0; i < LANES; i++) store(to + (k + i) * BLOCK + half, 0, words[i], FLOAT32);
        }
    }
}

CLONES static void pack_blocks(const PrefillProduct *p, const Packed *packed, int64_t block) {
    if (in_bfloat16(p->way))
        pack_block(p, packed, block, 1);
    else
        pack_block(p, packed, block, 0);
}

/* Define NAME(sums, weights, x, words, rows): sums [COUNT, BLOCK] += weights [COUNT, words] x [words, BLOCK]. STEP adds the products of
   one word. Blocks of up to LANES rows have one vector instead of two. */
#define ACCUMULATE(NAME, FEATURES, COUNT, STEP)                                                                                \
    FEATURES INLINE void NAME##_with(float *sums, const float *weights, const float *x, int64_t words,                         \
                                     const int vectors) {                                                                      \
        vec sum[COUNT][2];                                                                                                     \
        _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++)     \
            sum[i][j] = load(sums, i * BLOCK + j * LANES, FLOAT32);                                                            \
        for (int64_t k = 0; k < words; k++, x += BLOCK) {                                                                      \
            vec right[2];                                                                                                      \
            _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++) right[j] = load(x, j * LANES, FLOAT32);                  \
            _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++) \
                sum[i][j] = STEP(sum[i][j], weights[i * STRIDE + k], right[j]);                                                \
        }                                                                                                                      \
        _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++)     \
            store(sums, i * BLOCK + j * LANES, sum[i][j], FLOAT32);                                                            \
    }                                                                                                                          \
    FEATURES static void NAME(float *sums, const float *weights, const float *x, int64_t words, int64_t rows) {                \
        if (rows > LANES)                                                                                                      \
            NAME##_with(sums, weights, x, words, 2);                                                                           \
        else                                                                                                                   \
            NAME##_with(sums, weights, x, words, 1);                                                                           \
    }
#ifdef AVX512
enum { OUTPUTS_TOGETHER = 12, OUTPUTS_OF_MATRICES = 32 };
#define STEP_FLOATS(sum, w, x) (vec)_mm512_fmadd_ps(_mm512_set1_ps(w), (__m512)(x), (__m512)(sum))
#define STEP_PAIRS(sum, w, x) (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_ps(w), (__m512bh)(x))
ACCUMULATE(accumulate_floats, AVX512(""), OUTPUTS_TOGETHER, STEP_FLOATS)
ACCUMULATE(accumulate_pairs, PAIRS, OUTPUTS_TOGETHER, STEP_PAIRS)

MATRICES static void accumulate_matrices(float *sums, const float *weights, const float *x, int64_t words, int64_t rows) {
    const int both = rows > 16;
    float *below = sums + 16 * BLOCK;
    WRITTEN;
    _tile_loadd(0, sums, 4 * BLOCK);
    _tile_loadd(2, below, 4 * BLOCK);
    if (both) {
        _tile_loadd(1, sums + 16, 4 * BLOCK);
        _tile_loadd(3, below + 16, 4 * BLOCK);
    }
    for (int64_t k = 0; k < words; k += 16) {
        _tile_loadd(4, weights + k, 4 * STRIDE);
        _tile_loadd(5, weights + 16 * STRIDE + k, 4 * STRIDE);
        _tile_loadd(6, x + k * BLOCK, 4 * BLOCK);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (both) {
            _tile_loadd(7, x + k * BLOCK + 16, 4 * BLOCK);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 4 * BLOCK);
    _tile_stored(2, below, 4 * BLOCK);
    if (both) {
        _tile_stored(1, sums + 16, 4 * BLOCK);
        _tile_stored(3, below + 16, 4 * BLOCK);
    }
    WRITTEN;
}
#else
enum { OUTPUTS_TOGETHER = 6, OUTPUTS_OF_MATRICES = 6 /* none */ };
#ifdef PRODUCTS
#define STEP_FLOATS(sum, w, x) (vec)_mm256_fmadd_ps(_mm256_set1_ps(w), (__m256)(x), (__m256)(sum))
ACCUMULATE(accumulate_floats, __attribute__((target("avx2,fma"))), OUTPUTS_TOGETHER, STEP_FLOATS)
#else
#define STEP_FLOATS(sum, w, x) ((sum) + splat(w) * (x))
ACCUMULATE(accumulate_floats, CLONES, OUTPUTS_TOGETHER, STEP_FLOATS)
#endif
#endif
