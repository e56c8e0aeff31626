/* Products of many rows with weights in the types of their file. The product is transposed: x is packed once, a row per lane, and a
   tile of weights is unpacked into scratch that stays in the cache. */

typedef void (*Accumulate)(float *sums, int64_t stride, const float *weights, const float *x, int64_t words, int64_t outputs, int64_t rows);

/* Return the function that multiplies this way; null if the CPU lacks the instructions. */
static Accumulate accumulate_of(int way) {
    if (!has_fast()) return 0;
#ifdef AVX512
    if (way == FLOATS) return accumulate_floats;
    if (way == PAIRS_OF_BFLOAT16 && __builtin_cpu_supports("avx512bf16")) return accumulate_pairs;
    if (way == MATRICES_OF_BFLOAT16 && __builtin_cpu_supports("avx512bf16") && tiles_allowed()) return accumulate_matrices;
#endif
#ifdef PRODUCTS
    if (accumulate_integers_of(way)) return accumulate_floats;
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
    const int64_t of_word = in_bfloat16(p->way) ? 2 : 1, values = block_values(p->kinds[output]), size = block_bytes(p->kinds[output]);
    const uint8_t *from = p->rows[output] + word * of_word / values * size;
    for (int64_t at = 0; at < words * of_word / values * size; at += 64) __builtin_prefetch(from + at);
}

/* Restore words of outputs first..first + count - 1. scratch: [TILE, STRIDE]. */
FAST static void restore_tile(const PrefillProduct *p, float *scratch, int64_t first, int64_t count, int64_t word, int64_t words) {
    for (int64_t i = 0; i < count; i++) {
        fetch_ahead(p, first + i + ROWS_AHEAD, word, words);
        const uint8_t *row = p->rows[first + i];
        if (p->way >= INTEGERS && block_values(p->kinds[first + i]) > 1)
            unpack_weights(p->kinds[first + i], row, word, words, (WholeWeights *)(scratch + i * STRIDE));
        else if (!in_bfloat16(p->way))
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
    int codes = 0, numbers = 0;
    for (int64_t i = 0; i < p->outputs; i++) {
        const int values = block_values(p->kinds[i]);
        if (!values || p->width % values) return 1;
        *(values == 1 || p->way < INTEGERS ? &numbers : &codes) = 1;
    }
    const int64_t words = in_bfloat16(p->way) ? p->width / 2 : p->width, tiles = (p->outputs + TILE - 1) / TILE;
    const int64_t most = p->num_rows < MOST_ROWS_AT_ONCE ? p->num_rows : MOST_ROWS_AT_ONCE, blocks = (most + BLOCK - 1) / BLOCK;
    const int64_t groups = (p->width + GROUP - 1) / GROUP, of_groups = codes ? blocks * groups * (int64_t)(sizeof(RoundedRows) / 4) : 0;
    const int64_t of_words = numbers ? blocks * BLOCK * words : 0;
    const int64_t stride = blocks * BLOCK + 16, of_thread = TILE * stride + (TILE + OUTPUTS_TOGETHER) * STRIDE;
    float *memory = aligned_alloc(64, (of_words + of_groups + p->threads * of_thread) * sizeof(float));
    if (!memory) return 1;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
#ifdef _OPENMP
        float *sums = memory + of_words + of_groups + omp_get_thread_num() * of_thread, *scratch = sums + TILE * stride;
#else
        float *sums = memory + of_words + of_groups, *scratch = sums + TILE * stride;
#endif
#ifdef AVX512
        Tiles before;
        if (p->way == MATRICES_OF_BFLOAT16) before = enter_tiles();
#endif
        for (int64_t first_row = 0; first_row < p->num_rows; first_row += most) {
            const int64_t left = p->num_rows - first_row, rows = left < most ? left : most;
            const Packed x = {memory, (RoundedRows *)(memory + of_words), first_row, rows, (rows + BLOCK - 1) / BLOCK, words, groups};
#pragma omp for schedule(static)
            for (int64_t block = 0; block < x.blocks; block++) {
                if (numbers) pack_blocks(p, &x, block);
                if (codes) round_block(p, &x, block);
            }
#pragma omp for schedule(dynamic)
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t first = tile * TILE, count = p->outputs - first < TILE ? p->outputs - first : TILE;
                memset(sums, 0, TILE * stride * sizeof(float));
                for (int64_t word = 0; word < words; word += DEPTH) {
                    const int64_t depth = words - word < DEPTH ? words - word : DEPTH;
                    restore_tile(p, scratch, first, count, word, depth);
                    for (int64_t block = 0; block < x.blocks; block++) {
                        float *to = sums + block * BLOCK;
                        if (codes)
                            accumulate_kinds(p, &x, to, stride, scratch, block, word, depth, first, count);
                        else
                            accumulate(to, stride, scratch, memory + (block * words + word) * BLOCK, depth, count, rows - block * BLOCK);
                    }
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
