/* Attention of one row per sequence over the paged pool, in chunks of keys that are combined afterwards (FlashDecoding). */

enum { CHUNK = 256, HEADS = 8, FEW_HEADS = 4, MAX_DIM = 256, AHEAD = 8 };
enum { WIDTH = LANES / 4 }; /* vectors of values summed at once for FEW_HEADS heads: the number that fits the registers */

typedef struct {
    const void *q, *k, *v;      /* q: [seqs, heads, dim]; k, v: [blocks, block_size, kv_heads, dim] */
    const int32_t *table, *lens; /* [seqs, max_blocks], [seqs] */
    void *out;                   /* [rows, heads, dim]; rows after the last sequence become 0 */
    float *partial; /* set here. [seqs, kv_heads, chunks, group, dim + 2]: sum of values, sum of weights, maximum */
    int64_t rows, seqs, heads, kv_heads, dim, block_size, max_blocks, chunks, window; /* window: 0 if there is none */
    float scale;
    int32_t type, threads, pairs; /* pairs: set here, whether to use `logits_of_pairs` */
} Attention;

/* Sum `width` vectors of values from column j on, weighted for each head. The sums stay in registers over all keys. */
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

/* Logits of FEW_HEADS heads; if fewer are live, the last one is repeated. */
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
/* Logits of up to HEADS heads with LANES bfloat16 keys at a time: a vector holds one pair of channels of each key. dim: a multiple of
   32. */
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
            for (int k = 0; k < LANES; k += 4) { /* transpose 4 x 4 words of 4 keys in each quarter */
                const __m512i lo = _mm512_unpacklo_epi32(x[k], x[k + 1]), hi = _mm512_unpackhi_epi32(x[k], x[k + 1]);
                const __m512i lo2 = _mm512_unpacklo_epi32(x[k + 2], x[k + 3]), hi2 = _mm512_unpackhi_epi32(x[k + 2], x[k + 3]);
                y[k] = _mm512_unpacklo_epi64(lo, lo2);
                y[k + 1] = _mm512_unpackhi_epi64(lo, lo2);
                y[k + 2] = _mm512_unpacklo_epi64(hi, hi2);
                y[k + 3] = _mm512_unpackhi_epi64(hi, hi2);
            }
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) { /* gather the quarters: word 4 * quarter + k of all keys */
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
    int64_t rows[CHUNK + 2 * LANES]; /* the last key's offset is repeated at the end, for prefetches and whole vectors */
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
            const float top = largest(most), base = top == -INFINITY ? 0 : top; /* NaN skips top and reaches the weights */
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

/* Combine the chunks, in order, into one softmax. A chunk without keys has set only its sum of weights, 0. */
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
        shares[c] = weights == 0 ? 0 : most == -INFINITY ? weights : expf(most - top); /* -inf: all logits are NaN */
        total += weights == 0 ? 0 : shares[c] * weights;
    }
    for (int64_t j = 0; j < dim; j += LANES) {
        vec out = {0};
        for (int64_t c = 0; c < a->chunks; c++)
            if (shares[c] != 0) out += load(parts, c * size + j, FLOAT32) * shares[c];
        store(a->out, (seq * a->heads + head) * dim + j, out / total, a->type);
    }
}

/* Return 1 if memory is short. */
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
