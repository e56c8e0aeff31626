/* Attention of many rows in bfloat16 (FlashAttention-2, arXiv 2307.08691, with all products transposed). Logits are [keys, queries]: a
   query is a lane, its maximum and sum are taken over vectors, and K is read in place. The queries of a block are the rows of all heads
   of one KV head. Blocks of keys begin at multiples of KEYS, so a row's result is the same to the bit whatever rows are computed with
   it. */

enum { KEYS = 64, QUERIES = 64, VECTORS = QUERIES / 16 }; /* sizes of a block */

typedef struct {
    const uint16_t *q;        /* [rows, heads, dim]; strides are in values */
    const uint16_t *k, *v;    /* [keys, kv_heads, dim], [keys, kv_heads, v_dim] */
    const int64_t *positions; /* [rows], increasing */
    const float *sinks;       /* [heads], an extra logit per head, without a value; may be null */
    uint16_t *out;            /* [rows, heads, v_dim] */
    uint16_t *values;         /* [kv_heads, blocks of keys from first on, v_dim, KEYS]; values and first are set here */
    int64_t rows, heads, kv_heads, dim, v_dim, keys, q_stride, k_stride, v_stride, window, first; /* window: 0 if there is none */
    float scale, cap; /* cap: logits become cap * tanh(logit / cap); 0 if there is none */
    int32_t threads, matrices; /* matrices: multiply with AMX */
} Prefill;

#ifdef AVX512
#define PAIRS AVX512(",avx512bf16")
#define MATRICES AVX512(",avx512bf16,amx-tile,amx-bf16")
#define LOG2_E 1.44269504f
#define LEAST -1e30f /* below any logit, but finite: differences are not NaN */

typedef struct { /* buffers of a thread */
    uint16_t *queries; /* [dim / 2, QUERIES, 2] */
    uint16_t *tail;    /* [KEYS, dim]: the last block's K, zero after the last key */
    float *logits;     /* [KEYS, QUERIES] */
    uint16_t *weights; /* [KEYS / 2, QUERIES, 2] */
    float *sums;       /* [v_dim, QUERIES] */
} Work;

/* 2^x for x <= 0 with a relative error of about 1e-7; NaN for NaN. */
PAIRS INLINE __m512 power(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.f), x); /* returns the second argument if one is NaN */
    const __m512 n = _mm512_roundscale_ps(x, 0), r = x - n;
    __m512 y = _mm512_set1_ps(1.34004322e-3f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.6760371e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.55032721e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.40221074e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.93147207e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(y, n);
}

/* tanh(x); NaN for NaN. */
PAIRS INLINE __m512 tangent(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.f), e = power(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2 * LOG2_E)));
    const __m512 y = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    return _mm512_or_ps(y, _mm512_and_ps(x, _mm512_set1_ps(-0.f)));
}

/* sums [m, QUERIES] (+)= a [m, n] b [n, QUERIES]; b in pairs: [n / 2, QUERIES, 2]. m, n: multiples of 32. */
PAIRS static void multiply_pairs(float *sums, const uint16_t *a, int64_t stride, const uint16_t *b, int64_t m, int64_t n, int add) {
    enum { ROWS = 4 };
    for (int64_t i = 0; i < m; i += ROWS) {
        __m512 sum[ROWS][VECTORS];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                sum[row][j] = add ? _mm512_loadu_ps(sums + (i + row) * QUERIES + 16 * j) : _mm512_setzero_ps();
        const uint16_t *own = a + i * stride;
        for (int64_t k = 0; k < n; k += 2) {
            __m512bh right[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) right[j] = (__m512bh)_mm512_loadu_ps(b + k * QUERIES + 32 * j);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) {
                int32_t pair;
                memcpy(&pair, own + row * stride + k, 4);
                const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) sum[row][j] = _mm512_dpbf16_ps(sum[row][j], left, right[j]);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) _mm512_storeu_ps(sums + (i + row) * QUERIES + 16 * j, sum[row][j]);
    }
}

/* GCC does not treat tile loads as reads of memory: finish earlier stores first. */
#define WRITTEN __asm__ volatile("" ::: "memory")

/* `multiply_pairs` in AMX tiles of 16 rows. The thread's tiles are configured. */
MATRICES static void multiply_matrices(float *sums, const uint16_t *a, int64_t stride, const uint16_t *b, int64_t m, int64_t n, int add) {
    const int64_t size = 4 * QUERIES, left = 2 * stride;
    WRITTEN;
    for (int64_t i = 0; i < m; i += 32)
        for (int64_t j = 0; j < QUERIES; j += 32) {
            float *at = sums + i * QUERIES + j, *below = at + 16 * QUERIES;
            if (add) {
                _tile_loadd(0, at, size);
                _tile_loadd(1, at + 16, size);
                _tile_loadd(2, below, size);
                _tile_loadd(3, below + 16, size);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t k = 0; k < n; k += 32) {
                _tile_loadd(4, a + i * stride + k, left);
                _tile_loadd(5, a + (i + 16) * stride + k, left);
                _tile_loadd(6, b + k * QUERIES + 2 * j, size);
                _tile_loadd(7, b + k * QUERIES + 2 * j + 32, size);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, at, size);
            _tile_stored(1, at + 16, size);
            _tile_stored(2, below, size);
            _tile_stored(3, below + 16, size);
        }
    WRITTEN;
}

typedef struct { uint8_t bytes[64]; } Tiles;

/* GCC assumes that the intrinsic reads only the first 8 bytes of a configuration, and would drop stores to the others. */
MATRICES static inline void load_tiles(const Tiles *tiles) { __asm__ volatile("ldtilecfg %0" : : "m"(*tiles)); }

/* Configure eight tiles of 16 rows of 64 bytes. Returns the previous configuration (oneDNN's), for `leave_tiles`. */
MATRICES static Tiles enter_tiles(void) {
    Tiles before, own = {{1}}; /* palette 1 */
    for (int tile = 0; tile < 8; tile++) {
        own.bytes[16 + 2 * tile] = 64;
        own.bytes[48 + tile] = 16;
    }
    __asm__ volatile("sttilecfg %0" : "=m"(before));
    load_tiles(&own);
    return before;
}

MATRICES static void leave_tiles(const Tiles *before) {
    if (before->bytes[0])
        load_tiles(before);
    else
        _tile_release();
}

static void multiply(const Prefill *p, float *sums, const uint16_t *a, int64_t stride, const uint16_t *b, int64_t m, int64_t n, int add) {
    (p->matrices ? multiply_matrices : multiply_pairs)(sums, a, stride, b, m, n, add);
}

/* Transpose V of a block to [v_dim, KEYS]; zeros after the last key. */
PAIRS static void turn_values(const Prefill *p, int64_t head, int64_t block) {
    const int64_t blocks = (p->keys + KEYS - 1) / KEYS - p->first, start = (p->first + block) * KEYS;
    const int64_t count = p->keys - start < KEYS ? p->keys - start : KEYS;
    const uint16_t *v = p->v + start * p->v_stride + head * p->v_dim;
    uint16_t *to = p->values + (head * blocks + block) * p->v_dim * KEYS;
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(steps, _mm512_set1_epi32((int)p->v_stride * 2));
    for (int64_t i = 0; i < KEYS; i += 16) {
        const __mmask16 there = count >= i + 16 ? 0xffff : count <= i ? 0 : (1 << (count - i)) - 1;
        for (int64_t d = 0; d < p->v_dim; d += 2) {
            const __m512i pairs = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, offsets, v + i * p->v_stride + d, 1);
            _mm256_storeu_si256((__m256i *)(to + d * KEYS + i), _mm512_cvtepi32_epi16(pairs));
            _mm256_storeu_si256((__m256i *)(to + (d + 1) * KEYS + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
        }
    }
}

/* Compute queries first..first + QUERIES - 1 of a KV head: query t is row t / group, head t % group of the group. */
PAIRS static void attend_rows(const Prefill *p, int64_t kv_head, int64_t first, const Work *w) {
    const int64_t group = p->heads / p->kv_heads, all = p->rows * group, dim = p->dim, v_dim = p->v_dim;
    const int64_t count = all - first < QUERIES ? all - first : QUERIES, blocks = (p->keys + KEYS - 1) / KEYS - p->first;
    int32_t from[QUERIES] __attribute__((aligned(64))), to[QUERIES] __attribute__((aligned(64))), at[QUERIES] __attribute__((aligned(64)));
    __m512 most[VECTORS], total[VECTORS];
    float sinks[QUERIES] __attribute__((aligned(64)));
    const int64_t row = first / group, last_row = (first + count - 1) / group; /* offsets count from the first row, to fit 32 bits */
    for (int64_t t = 0; t < QUERIES; t++) { /* lanes after the last query repeat that query */
        const int64_t query = first + (t < count ? t : count - 1), head = kv_head * group + query % group;
        from[t] = (int32_t)(((query / group - row) * p->q_stride + head * dim) * 2);
        to[t] = (int32_t)(((query / group - row) * p->heads + head) * v_dim * 2);
        at[t] = (int32_t)p->positions[query / group];
        sinks[t] = p->sinks ? p->sinks[head] * LOG2_E : LEAST;
    }
    for (int64_t d = 0; d < dim; d += 2)
        for (int j = 0; j < VECTORS; j++)
            _mm512_storeu_si512(w->queries + d * QUERIES + 32 * j,
                                _mm512_i32gather_epi32(_mm512_load_si512(from + 16 * j), p->q + row * p->q_stride + d, 1));
    for (int j = 0; j < VECTORS; j++) {
        most[j] = _mm512_load_ps(sinks + 16 * j);
        total[j] = _mm512_set1_ps(p->sinks ? 1.f : 0.f);
    }
    memset(w->sums, 0, v_dim * QUERIES * sizeof(float));
    const int64_t lowest = p->positions[row], highest = p->positions[last_row], window = p->window;
    const int64_t begin = window && lowest >= window ? (lowest - window + 1) / KEYS : 0;
    const __m512 by = _mm512_set1_ps((p->cap ? p->cap : p->scale) * LOG2_E), by_cap = _mm512_set1_ps(p->cap ? p->scale / p->cap : 1);
    for (int64_t block = begin; block * KEYS <= highest; block++) {
        const int64_t start = block * KEYS, left = p->keys - start;
        const uint16_t *k = p->k + start * p->k_stride + kv_head * dim;
        int64_t stride = p->k_stride;
        if (left < KEYS) {
            memset(w->tail, 0, KEYS * dim * 2);
            for (int64_t i = 0; i < left; i++) memcpy(w->tail + i * dim, k + i * stride, dim * 2);
            k = w->tail, stride = dim;
        }
        multiply(p, w->logits, k, stride, w->queries, KEYS, dim, 0);
        const int hides = start + KEYS - 1 > lowest || (window && start <= highest - window);
        int moved = 0;
        __m512 factors[VECTORS];
        for (int j = 0; j < VECTORS; j++) {
            float *logits = w->logits + 16 * j;
            const __m512i position = _mm512_load_si512(at + 16 * j), oldest = _mm512_sub_epi32(position, _mm512_set1_epi32((int)window));
            __m512 top = _mm512_set1_ps(-INFINITY);
            for (int i = 0; i < KEYS; i++) {
                __m512 x = _mm512_loadu_ps(logits + i * QUERIES);
                if (p->cap) {
                    x = tangent(_mm512_mul_ps(x, by_cap));
                    _mm512_storeu_ps(logits + i * QUERIES, x);
                }
                if (hides) {
                    const __m512i key = _mm512_set1_epi32((int)start + i);
                    __mmask16 sees = _mm512_cmple_epi32_mask(key, position);
                    if (window) sees &= _mm512_cmpgt_epi32_mask(key, oldest);
                    x = _mm512_mask_blend_ps(sees, _mm512_set1_ps(-INFINITY), x);
                    _mm512_storeu_ps(logits + i * QUERIES, x);
                }
                top = _mm512_max_ps(x, top);
            }
            top = _mm512_max_ps(_mm512_mul_ps(top, by), most[j]);
            factors[j] = power(_mm512_sub_ps(most[j], top));
            moved |= _mm512_cmplt_ps_mask(most[j], top);
            most[j] = top;
            __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (int i = 0; i < KEYS; i += 2) {
                const __m512 x = power(_mm512_fmsub_ps(_mm512_loadu_ps(logits + i * QUERIES), by, top));
                const __m512 y = power(_mm512_fmsub_ps(_mm512_loadu_ps(logits + (i + 1) * QUERIES), by, top));
                sum[0] = _mm512_add_ps(sum[0], x);
                sum[1] = _mm512_add_ps(sum[1], y);
                const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
                const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(y));
                _mm512_storeu_si512(w->weights + i * QUERIES + 32 * j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
            total[j] = _mm512_fmadd_ps(total[j], factors[j], _mm512_add_ps(sum[0], sum[1]));
        }
        if (moved)
            for (int64_t d = 0; d < v_dim; d++)
                for (int j = 0; j < VECTORS; j++) {
                    float *sum = w->sums + d * QUERIES + 16 * j;
                    _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), factors[j]));
                }
        const uint16_t *values = p->values + (kv_head * blocks + block - p->first) * v_dim * KEYS;
        multiply(p, w->sums, values, KEYS, w->weights, v_dim, KEYS, 1);
    }
    for (int j = 0; j < VECTORS; j++) {
        const __mmask16 real = count >= 16 * (j + 1) ? 0xffff : count <= 16 * j ? 0 : (1 << (count - 16 * j)) - 1;
        const __m512i where = _mm512_load_si512(to + 16 * j);
        for (int64_t d = 0; d < v_dim; d += 2) {
            const __m512 x = _mm512_div_ps(_mm512_loadu_ps(w->sums + d * QUERIES + 16 * j), total[j]);
            const __m512 y = _mm512_div_ps(_mm512_loadu_ps(w->sums + (d + 1) * QUERIES + 16 * j), total[j]);
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
            const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(y));
            _mm512_mask_i32scatter_epi32(p->out + row * p->heads * v_dim + d, real, where, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)), 1);
        }
    }
}

/* Ask Linux for the use of tiles. Not tried on other systems. */
static int tiles_allowed(void) {
#ifdef __linux__
    return __builtin_cpu_supports("amx-bf16") && !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
#else
    return 0;
#endif
}
#endif

/* Return 1 if memory is short or the CPU lacks the instructions. */
int cb_prefill_attention(const Prefill *given) {
#ifdef AVX512
    Prefill own = *given, *p = &own;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512dq")) return 1;
    if (p->matrices && !tiles_allowed()) return 1;
    const int64_t oldest = p->window ? p->positions[0] - p->window + 1 : 0;
    p->first = oldest > 0 ? oldest / KEYS : 0;
    const int64_t blocks = (p->keys + KEYS - 1) / KEYS - p->first, tiles = (p->rows * (p->heads / p->kv_heads) + QUERIES - 1) / QUERIES;
    const int64_t parts[] = {p->dim * QUERIES * 2, KEYS * p->dim * 2, KEYS * QUERIES * 4, KEYS * QUERIES * 2, p->v_dim * QUERIES * 4};
    int64_t size = 0;
    for (int i = 0; i < 5; i++) size += parts[i];
    const int64_t values = p->kv_heads * blocks * p->v_dim * KEYS * 2;
    char *memory = aligned_alloc(64, values + p->threads * size);
    if (!memory) return 1;
    p->values = (uint16_t *)memory;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
#ifdef _OPENMP
        char *mine = memory + values + omp_get_thread_num() * size;
#else
        char *mine = memory + values;
#endif
        char *at[5];
        for (int i = 0; i < 5; mine += parts[i++]) at[i] = mine;
        const Work work = {(uint16_t *)at[0], (uint16_t *)at[1], (float *)at[2], (uint16_t *)at[3], (float *)at[4]};
        Tiles before;
        if (p->matrices) before = enter_tiles();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p->kv_heads * blocks; i++) turn_values(p, i / blocks, i % blocks);
#pragma omp for schedule(dynamic) /* the longest blocks first */
        for (int64_t i = p->kv_heads * tiles - 1; i >= 0; i--) attend_rows(p, i % p->kv_heads, i / p->kv_heads * QUERIES, &work);
        if (p->matrices) leave_tiles(&before);
    }
    free(memory);
    return 0;
#else
    return 1;
#endif
}
