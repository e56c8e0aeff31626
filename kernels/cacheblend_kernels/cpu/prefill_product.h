/* Products of many rows with weights in the types of their file. The product is transposed: x is packed once, a row per lane, and a
   tile of weights is unpacked into scratch that stays in the cache. */

typedef void (*Accumulate)(float *sums, const float *weights, const float *x, int64_t words, int64_t rows);

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

/* Return the products [rows, outputs] of LANES rows with LANES outputs or fewer, from sums [tile, BLOCK]. first: the outputs' first row of
   weights. */
INLINE void finish_lanes(const PrefillProduct *p, const float *sums, int64_t first, int64_t outputs, vec y[LANES]) {
    vec bias = {0};
    if (p->bias && outputs == LANES) bias = load(p->bias, first, p->type);
    if (p->bias && outputs < LANES)
        for (int i = 0; i < outputs; i++) bias[i] = value_at(p->bias, first + i, p->type);
    for (int i = 0; i < LANES; i++) y[i] = load(sums, i * BLOCK, FLOAT32);
    transpose(y);
    for (int i = 0; i < LANES; i++) y[i] = y[i] * p->factor + bias;
}

/* Store sums [blocks, tile, BLOCK] of outputs first..first + count - 1. */
INLINE void finish_outputs(const PrefillProduct *p, const Packed *x, const float *sums, int64_t first, int64_t count, const int gates) {
    const int64_t size = p->type == FLOAT32 ? 4 : 2, width = p->outputs >> gates, own = count >> gates;
    for (int64_t row = 0; row < x->rows; row += LANES)
        for (int64_t output = 0; output < own; output += LANES) {
            const int64_t outputs = own - output < LANES ? own - output : LANES;
            const float *from = sums + (row / BLOCK * tile_of(p) + output) * BLOCK + row % BLOCK;
            vec y[LANES], up[LANES];
            finish_lanes(p, from, weights_of(p, first + output), outputs, y);
            if (gates) finish_lanes(p, from + own * BLOCK, weights_of(p, first + own + output), outputs, up);
            for (int i = 0; i < LANES && row + i < x->rows; i++) {
                char *out = (char *)p->out + ((x->first_row + row + i) * width + (first >> gates) + output) * size;
                __builtin_prefetch(out + LANES * width * size, 1); /* rows are pages apart */
                const vec z = gates ? gated(as_type(y[i], p->type), as_type(up[i], p->type), p->type) : y[i];
                if (outputs == LANES)
                    store(out, 0, z, p->type);
                else
                    for (int j = 0; j < outputs; j++) put(out, j, z[j], p->type);
            }
        }
}

#ifdef AVX512
#define RESTORE_PAIRS restore_row_by_cpu
#else
#define RESTORE_PAIRS restore_row_bf16
#endif

enum { ROWS_AHEAD = 8 };

/* Fetch words of an output that is restored soon: its part is too short for the CPU to notice a pattern. */
INLINE void fetch_ahead(const PrefillProduct *p, int64_t output, int64_t word, int64_t words) {
    if (output >= p->outputs) return;
    const int64_t from = weights_of(p, output), of_word = in_bfloat16(p->way) ? 2 : 1;
    const int64_t values = block_values(p->kinds[from]), size = block_bytes(p->kinds[from]);
    const uint8_t *at = p->rows[from] + word * of_word / values * size, *end = at + words * of_word / values * size;
    for (; at < end; at += 64) __builtin_prefetch(at);
}

/* Restore words of outputs first..first + count - 1. scratch: [tile, STRIDE]. */
FAST static void restore_tile(const PrefillProduct *p, float *scratch, int64_t first, int64_t count, int64_t word, int64_t words) {
    for (int64_t i = 0; i < count; i++, scratch += STRIDE) {
        fetch_ahead(p, first + i + ROWS_AHEAD, word, words);
        const int64_t from = weights_of(p, first + i);
        const uint8_t *row = p->rows[from], kind = p->kinds[from];
        if (p->way >= INTEGERS && block_values(kind) > 1)
            unpack_weights(kind, row, word, words, (WholeWeights *)scratch);
        else if (!in_bfloat16(p->way))
            restore_row(kind, row, word, words, scratch);
        else if (kind == BF16)
            memcpy(scratch, row + 4 * word, 4 * words);
        else
            RESTORE_PAIRS(kind, row, 2 * word, 2 * words, (uint16_t *)scratch);
    }
}

CLONES static void finish_tile(const PrefillProduct *p, const Packed *x, const float *sums, int64_t first, int64_t count) {
    if (p->gated)
        finish_outputs(p, x, sums, first, count, 1);
    else
        finish_outputs(p, x, sums, first, count, 0);
}

/* Add products of words word..word + depth - 1 of a tile and a block of rows to sums [tile, BLOCK], and fetch packed rows that are
   multiplied next. An output's sums depend on its own kind, not on its neighbours': fewer outputs of a kind than are computed together
   have sums apart. */
static void accumulate_tile(const PrefillProduct *p, const Packed *x, Accumulate accumulate, float *sums, const float *scratch,
                            int64_t block, int64_t word, int64_t depth, int64_t first, int64_t count) {
    const int64_t rows = x->rows - block * BLOCK, next_block = block + 1 < x->blocks ? block + 1 : 0;
    const int64_t next_word = next_block ? word : word + depth < x->words ? word + depth : 0;
    const float *numbers = x->packed + (block * x->words + word) * BLOCK;
    const RoundedRows *rounded = x->rounded + block * x->groups + word / GROUP;
    const char *next = (const char *)(x->packed + (next_block * x->words + next_word) * BLOCK);
    int64_t size = DEPTH * BLOCK * sizeof(float);
    if (p->way >= INTEGERS) next = (const char *)(x->rounded + next_block * x->groups + next_word / GROUP), size = sizeof(RoundedRows);
    if (p->way == MATRICES_OF_BFLOAT16) size = 0; /* fetching takes longer than it saves */
    const int64_t together = p->way == MATRICES_OF_BFLOAT16 ? OUTPUTS_OF_MATRICES : OUTPUTS_TOGETHER;
    float apart[OUTPUTS_TOGETHER * BLOCK] = {0};
    for (int64_t i = 0, same = together; i < count; i += same) {
        const int kind = p->kinds[weights_of(p, first + i)];
        for (same = p->way >= INTEGERS ? 1 : together; same < together && i + same < count; same++)
            if (p->kinds[weights_of(p, first + i + same)] != kind) break;
        for (int64_t at = size * i / count; at < size * (i + same) / count; at += 64) __builtin_prefetch(next + at, 0, 2);
        float *to = same < together ? memcpy(apart, sums + i * BLOCK, same * BLOCK * sizeof(float)) : sums + i * BLOCK;
        if (p->way >= INTEGERS && block_values(kind) > 1)
            accumulate_codes(p, to, scratch + i * STRIDE, rounded, depth, kind, rows);
        else
            accumulate(to, scratch + i * STRIDE, numbers, depth, rows);
        if (to == apart) memcpy(sums + i * BLOCK, apart, same * BLOCK * sizeof(float));
    }
}

/* Return 1 if memory is short, the CPU lacks the instructions, or a kind is unknown or does not have rows of this width. */
int cb_prefill_product(const PrefillProduct *p) {
    const Accumulate accumulate = accumulate_of(p->way);
    if (!accumulate || (p->gated && p->outputs % (2 * LANES))) return 1;
    int codes = 0, numbers = 0;
    for (int64_t i = 0; i < p->outputs; i++) {
        const int values = block_values(p->kinds[i]);
        if (!values || p->width % values) return 1;
        *(values == 1 || p->way < INTEGERS ? &numbers : &codes) = 1;
    }
    const int64_t words = in_bfloat16(p->way) ? p->width / 2 : p->width, size = tile_of(p), tiles = (p->outputs + size - 1) / size;
    const int64_t passes = (p->num_rows + MOST_ROWS_AT_ONCE - 1) / MOST_ROWS_AT_ONCE, share = passes ? p->num_rows / passes : 0;
    const int64_t blocks = share / BLOCK + 1, most = blocks * BLOCK; /* about equal passes: each unpacks all weights */
    const int64_t groups = (p->width + GROUP - 1) / GROUP, of_groups = codes ? blocks * groups * (int64_t)(sizeof(RoundedRows) / 4) : 0;
    const int64_t of_words = numbers ? blocks * BLOCK * words : 0;
    const int64_t of_sums = blocks * size * BLOCK, of_thread = of_sums + (size + OUTPUTS_TOGETHER) * STRIDE;
    float *memory = aligned_alloc(64, (of_words + of_groups + p->threads * of_thread) * sizeof(float));
    if (!memory) return 1;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
#ifdef _OPENMP
        float *sums = memory + of_words + of_groups + omp_get_thread_num() * of_thread, *scratch = sums + of_sums;
#else
        float *sums = memory + of_words + of_groups, *scratch = sums + of_sums;
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
                const int64_t first = tile * size, count = p->outputs - first < size ? p->outputs - first : size;
                memset(sums, 0, of_sums * sizeof(float));
                for (int64_t word = 0; word < words; word += DEPTH) {
                    const int64_t depth = words - word < DEPTH ? words - word : DEPTH;
                    restore_tile(p, scratch, first, count, word, depth);
                    for (int64_t block = 0; block < x.blocks; block++)
                        accumulate_tile(p, &x, accumulate, sums + block * size * BLOCK, scratch, block, word, depth, first, count);
                }
                finish_tile(p, &x, sums, first, count);
            }
        }
#ifdef AVX512
        if (p->way == MATRICES_OF_BFLOAT16) leave_tiles(&before);
#endif
    }
    free(memory);
    return 0;
}
