/* Products of many rows with weights in the types of their file. The product is transposed: x is packed once, a row per lane, and a
   tile of weights is dequantised into scratch that stays in the cache, where it is read value by value. The sum of a result adds one
   word (a float, or a pair of bfloat16) after the other, so it is the same to the bit whatever rows are computed with it. */

enum { TILE = 96, DEPTH = 256, STRIDE = DEPTH + 16, BLOCK = 2 * LANES, MOST_ROWS_AT_ONCE = 1024 };
/* outputs of a tile; words of scratch per output, and from one output to the next; rows in a block of packed x; rows per pass */
enum { FLOATS = 0, PAIRS_OF_BFLOAT16 = 1, MATRICES_OF_BFLOAT16 = 2 }; /* ways to multiply */

typedef struct {
    const void *x;              /* [num_rows, width] */
    const uint8_t *const *rows; /* address of each output's weights */
    const uint8_t *kinds;       /* type of each output's weights */
    const void *bias;           /* [outputs]; may be null */
    void *out;                  /* [num_rows, outputs] */
    int64_t num_rows, width, outputs;
    float factor;               /* of the product */
    int32_t type, threads, way; /* type: of x, bias and out */
} PrefillProduct;

typedef struct {
    const float *packed; /* words [blocks, words, BLOCK] */
    int64_t first_row, rows, blocks, words;
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
    float *to = (float *)packed->packed + block * packed->words * BLOCK;
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
    if (p->way == FLOATS)
        pack_block(p, packed, block, 0);
    else
        pack_block(p, packed, block, 1);
}

/* Define NAME(sums, stride, weights, x, words, outputs, rows): sums [outputs, BLOCK] += weights [outputs, words] x [words, BLOCK], for
   COUNT outputs at a time. STEP adds the products of one word. Blocks of up to LANES rows have one vector instead of two. */
#define ACCUMULATE(NAME, FEATURES, COUNT, STEP)                                                                                \
    FEATURES INLINE void NAME##_with(float *sums, int64_t stride, const float *weights, const float *x, int64_t words,         \
                                     const int vectors) {                                                                      \
        vec sum[COUNT][2];                                                                                                     \
        _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++)     \
            sum[i][j] = load(sums, i * stride + j * LANES, FLOAT32);                                                           \
        for (int64_t k = 0; k < words; k++, x += BLOCK) {                                                                      \
            vec right[2];                                                                                                      \
            _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++) right[j] = load(x, j * LANES, FLOAT32);                  \
            _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++) \
                sum[i][j] = STEP(sum[i][j], weights[i * STRIDE + k], right[j]);                                                \
        }                                                                                                                      \
        _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++)     \
            store(sums, i * stride + j * LANES, sum[i][j], FLOAT32);                                                           \
    }                                                                                                                          \
    FEATURES static void NAME(float *sums, int64_t stride, const float *weights, const float *x, int64_t words,                \
                              int64_t outputs, int64_t rows) {                                                                 \
        for (int64_t i = 0; i < outputs; i += COUNT)                                                                           \
            if (rows > LANES)                                                                                                  \
                NAME##_with(sums + i * stride, stride, weights + i * STRIDE, x, words, 2);                                     \
            else                                                                                                               \
                NAME##_with(sums + i * stride, stride, weights + i * STRIDE, x, words, 1);                                     \
    }
#ifdef AVX512
#define STEP_FLOATS(sum, w, x) (vec)_mm512_fmadd_ps(_mm512_set1_ps(w), (__m512)(x), (__m512)(sum))
#define STEP_PAIRS(sum, w, x) (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_ps(w), (__m512bh)(x))
ACCUMULATE(accumulate_floats, AVX512(""), 12, STEP_FLOATS)
ACCUMULATE(accumulate_pairs, PAIRS, 12, STEP_PAIRS)

MATRICES static void accumulate_matrices(float *sums, int64_t stride, const float *weights, const float *x, int64_t words,
                                         int64_t outputs, int64_t rows) {
    const int both = rows > 16;
    WRITTEN;
    for (int64_t i = 0; i < outputs; i += 32, sums += 32 * stride, weights += 32 * STRIDE) {
        float *below = sums + 16 * stride;
        _tile_loadd(0, sums, 4 * stride);
        _tile_loadd(2, below, 4 * stride);
        if (both) {
            _tile_loadd(1, sums + 16, 4 * stride);
            _tile_loadd(3, below + 16, 4 * stride);
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
        _tile_stored(0, sums, 4 * stride);
        _tile_stored(2, below, 4 * stride);
        if (both) {
            _tile_stored(1, sums + 16, 4 * stride);
            _tile_stored(3, below + 16, 4 * stride);
        }
    }
    WRITTEN;
}
#elif defined(PRODUCTS)
#define STEP_FLOATS(sum, w, x) (vec)_mm256_fmadd_ps(_mm256_set1_ps(w), (__m256)(x), (__m256)(sum))
ACCUMULATE(accumulate_floats, __attribute__((target("avx2,fma"))), 6, STEP_FLOATS)
#else
#define STEP_FLOATS(sum, w, x) ((sum) + splat(w) * (x))
ACCUMULATE(accumulate_floats, CLONES, 6, STEP_FLOATS)
#endif

typedef void (*Accumulate)(float *sums, int64_t stride, const float *weights, const float *x, int64_t words, int64_t outputs, int64_t rows);

/* Return the function that multiplies this way; null if the CPU lacks the instructions. */
static Accumulate accumulate_of(int way) {
    if (!has_fast()) return 0;
#ifdef AVX512
    if (way == FLOATS) return accumulate_floats;
    if (way == PAIRS_OF_BFLOAT16 && __builtin_cpu_supports("avx512bf16")) return accumulate_pairs;
    if (way == MATRICES_OF_BFLOAT16 && __builtin_cpu_supports("avx512bf16") && tiles_allowed()) return accumulate_matrices;
#endif
    return way == FLOATS ? accumulate_floats : 0;
}

/* Store sums [count, stride] of outputs first..first + count - 1. */
INLINE void finish_outputs(const PrefillProduct *p, const Packed *x, const float *sums, int64_t stride, int64_t first, int64_t count) {
    const size_t size = p->type == FLOAT32 ? 4 : 2;
    for (int64_t output = 0; output < count; output += LANES) {
        const int64_t outputs = count - output < LANES ? count - output : LANES;
        vec bias = {0};
        if (p->bias && outputs == LANES) bias = load(p->bias, first + output, p->type);
        if (p->bias && outputs < LANES)
            for (int i = 0; i < outputs; i++) bias[i] = value_at(p->bias, first + output + i, p->type);
        for (int64_t row = 0; row < x->rows; row += LANES) {
            vec y[LANES];
            for (int i = 0; i < LANES; i++) y[i] = load(sums, (output + i) * stride + row, FLOAT32);
            transpose(y);
            for (int i = 0; i < LANES && row + i < x->rows; i++) {
                char *out = (char *)p->out + ((x->first_row + row + i) * p->outputs + first + output) * size;
                const vec z = y[i] * p->factor + bias;
                if (outputs == LANES)
                    store(out, 0, z, p->type);
                else
                    for (int j = 0; j < outputs; j++) put(out, j, z[j], p->type);
            }
        }
    }
}

#ifdef AVX512
#define RESTORE_PAIRS restore_row_by_cpu
#else
#define RESTORE_PAIRS restore_row_bf16
#endif

enum { ROWS_AHEAD = 4 };

/* Fetch words of an output that is restored soon: its part is too short for the CPU to notice a pattern. */
INLINE void fetch_ahead(const PrefillProduct *p, int64_t output, int64_t word, int64_t words) {
    if (output >= p->outputs) return;
    const int64_t of_word = p->way == FLOATS ? 1 : 2, values = block_values(p->kinds[output]), size = block_bytes(p->kinds[output]);
    const uint8_t *from = p->rows[output] + word * of_word / values * size;
    for (int64_t at = 0; at < words * of_word / values * size; at += 64) __builtin_prefetch(from + at);
}

/* Restore words of outputs first..first + count - 1. scratch: [TILE, STRIDE]. */
FAST static void restore_tile(const PrefillProduct *p, float *scratch, int64_t first, int64_t count, int64_t word, int64_t words) {
    for (int64_t i = 0; i < count; i++) {
        fetch_ahead(p, first + i + ROWS_AHEAD, word, words);
        const uint8_t *row = p->rows[first + i];
        if (p->way == FLOATS)
            restore_row(p->kinds[first + i], row, word, words, scratch + i * STRIDE);
        else if (p->kinds[first + i] == BF16)
            memcpy(scratch + i * STRIDE, row + 4 * word, 4 * words);
        else
            RESTORE_PAIRS(p->kinds[first + i], row, 2 * word, 2 * words, (uint16_t *)(scratch + i * STRIDE));
    }
}

CLONES static void finish_tile(const PrefillProduct *p, const Packed *x, const float *sums, int64_t stride, int64_t first, int64_t count) {
    finish_outputs(p, x, sums, stride, first, count);
}

/* Return 1 if memory is short, the CPU lacks the instructions, or a kind is unknown or does not have rows of this width. */
int cb_prefill_product(const PrefillProduct *p) {
    const Accumulate accumulate = accumulate_of(p->way);
    if (!accumulate) return 1;
    for (int64_t i = 0; i < p->outputs; i++)
        if (!block_values(p->kinds[i]) || p->width % block_values(p->kinds[i])) return 1;
    const int64_t words = p->way == FLOATS ? p->width : p->width / 2, tiles = (p->outputs + TILE - 1) / TILE;
    const int64_t most = p->num_rows < MOST_ROWS_AT_ONCE ? p->num_rows : MOST_ROWS_AT_ONCE, blocks = (most + BLOCK - 1) / BLOCK;
    const int64_t stride = blocks * BLOCK + 16, of_thread = TILE * (stride + STRIDE);
    float *memory = aligned_alloc(64, (blocks * BLOCK * words + p->threads * of_thread) * sizeof(float));
    if (!memory) return 1;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
#ifdef _OPENMP
        float *sums = memory + blocks * BLOCK * words + omp_get_thread_num() * of_thread, *scratch = sums + TILE * stride;
#else
        float *sums = memory + blocks * BLOCK * words, *scratch = sums + TILE * stride;
#endif
#ifdef AVX512
        Tiles before;
        if (p->way == MATRICES_OF_BFLOAT16) before = enter_tiles();
#endif
        for (int64_t first_row = 0; first_row < p->num_rows; first_row += most) {
            const int64_t left = p->num_rows - first_row, rows = left < most ? left : most;
            const Packed x = {memory, first_row, rows, (rows + BLOCK - 1) / BLOCK, words};
#pragma omp for schedule(static)
            for (int64_t block = 0; block < x.blocks; block++) pack_blocks(p, &x, block);
#pragma omp for schedule(dynamic)
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t first = tile * TILE, count = p->outputs - first < TILE ? p->outputs - first : TILE;
                memset(sums, 0, TILE * stride * sizeof(float));
                for (int64_t word = 0; word < words; word += DEPTH) {
                    const int64_t depth = words - word < DEPTH ? words - word : DEPTH;
                    restore_tile(p, scratch, first, count, word, depth);
                    for (int64_t block = 0; block < x.blocks; block++)
                        accumulate(sums + block * BLOCK, stride, scratch, memory + (block * words + word) * BLOCK, depth, count,
                                   rows - block * BLOCK);
                }
                finish_tile(p, &x, sums, stride, first, count);
            }
        }
#ifdef AVX512
        if (p->way == MATRICES_OF_BFLOAT16) leave_tiles(&before);
#endif
    }
    free(memory);
    return 0;
}
