/* Attention of many rows in float32, in the order of prefill_attention.h: logits are [keys, queries], a query is a lane, and a row's
   result is the same to the bit whatever rows are computed with it, if V is finite. K and V are read in place. */

enum { FLOAT_ROWS = LANES == 8 ? 4 : 8, FLOAT_VECTORS = LANES == 8 ? 3 : 2, FLOAT_QUERIES = FLOAT_VECTORS * LANES };

typedef struct { /* buffers of a thread */
    float *queries; /* [dim, FLOAT_QUERIES] */
    float *tail;    /* [KEYS, dim]: the last block's K, zero after the last key */
    float *logits;  /* [KEYS, FLOAT_QUERIES], then weights */
    float *sums;    /* [v_dim, FLOAT_QUERIES] */
} FloatWork;

/* sums [m, FLOAT_QUERIES] = factors * sums + a [m, n] b [n, FLOAT_QUERIES]. a's rows and columns are row_step and step apart; m: a
   multiple of FLOAT_ROWS; factors: [FLOAT_VECTORS], or null for zeros. */
FAST INLINE void multiply_floats(float *sums, const float *a, int64_t row_step, int64_t step, const float *b, int64_t m, int64_t n,
                                 const vec *factors) {
    for (int64_t i = 0; i < m; i += FLOAT_ROWS, sums += FLOAT_ROWS * FLOAT_QUERIES) {
        vec sum[FLOAT_ROWS][FLOAT_VECTORS];
        _Pragma("GCC unroll 8") for (int row = 0; row < FLOAT_ROWS; row++)
            _Pragma("GCC unroll 3") for (int j = 0; j < FLOAT_VECTORS; j++)
                sum[row][j] = factors ? load(sums, row * FLOAT_QUERIES + j * LANES, FLOAT32) * factors[j] : (vec){0};
        const float *left = a + i * row_step;
        for (int64_t k = 0; k < n; k++, left += step) {
            vec right[FLOAT_VECTORS];
            if (step > 1) __builtin_prefetch(left + 12 * step); /* V's rows are apart */
            _Pragma("GCC unroll 3") for (int j = 0; j < FLOAT_VECTORS; j++) right[j] = load(b, k * FLOAT_QUERIES + j * LANES, FLOAT32);
            _Pragma("GCC unroll 8") for (int row = 0; row < FLOAT_ROWS; row++) {
                const vec one = everywhere(left + row * row_step);
                _Pragma("GCC unroll 3") for (int j = 0; j < FLOAT_VECTORS; j++) sum[row][j] += one * right[j];
            }
        }
        _Pragma("GCC unroll 8") for (int row = 0; row < FLOAT_ROWS; row++)
            _Pragma("GCC unroll 3") for (int j = 0; j < FLOAT_VECTORS; j++) store(sums, row * FLOAT_QUERIES + j * LANES, sum[row][j], FLOAT32);
    }
}

/* Cap and hide logits of a block of keys, turn them into weights, and return the factor of what was added up before. */
FAST INLINE vec turn_to_weights(const Prefill *p, float *logits, int64_t start, int hides, veci position, vec *most, vec *total) {
    vec top = *most, sum = {0};
    for (int i = 0; i < KEYS; i++) {
        vec x = load(logits, i * FLOAT_QUERIES, FLOAT32);
        if (p->cap) { /* tanh */
            const vec e = exponential((vec)((veci)(x * (2 / p->cap)) | (int32_t)0x80000000));
            x = (vec)((veci)((1.f - e) / (1.f + e)) | ((veci)x & (int32_t)0x80000000)) * p->cap;
        }
        if (hides) {
            veci sees = (int32_t)(start + i) <= position;
            if (p->window) sees &= (int32_t)(start + i) > position - (int32_t)p->window;
            x = where(sees, x, splat(-INFINITY));
        }
        store(logits, i * FLOAT_QUERIES, x, FLOAT32);
        top = larger(x, top);
    }
    for (int i = 0; i < KEYS; i++) {
        const vec weight = exponential(load(logits, i * FLOAT_QUERIES, FLOAT32) - top);
        store(logits, i * FLOAT_QUERIES, weight, FLOAT32);
        sum += weight;
    }
    const vec factor = exponential(*most - top);
    *most = top, *total = *total * factor + sum;
    return factor;
}

/* Compute queries first..first + FLOAT_QUERIES - 1 of a KV head: query t is row t / group, head t % group of the group. */
FAST static void attend_floats(const Prefill *p, int64_t kv_head, int64_t first, const FloatWork *w) {
    const int64_t group = p->heads / p->kv_heads, all = p->rows * group, dim = p->dim, v_dim = p->v_dim;
    const int64_t count = all - first < FLOAT_QUERIES ? all - first : FLOAT_QUERIES;
    const float *q = (const float *)p->q, *all_k = (const float *)p->k, *all_v = (const float *)p->v;
    veci position[FLOAT_VECTORS];
    vec most[FLOAT_VECTORS], total[FLOAT_VECTORS], factors[FLOAT_VECTORS];
    const float *own[FLOAT_QUERIES];
    for (int t = 0; t < FLOAT_QUERIES; t++) { /* lanes after the last query repeat that query */
        const int64_t query = first + (t < count ? t : count - 1), head = kv_head * group + query % group;
        own[t] = q + query / group * p->q_stride + head * dim;
        position[t / LANES][t % LANES] = (int32_t)p->positions[query / group];
        const int sinks = p->sinks && p->sinks[head] > -1e30f;
        most[t / LANES][t % LANES] = sinks ? p->sinks[head] : -1e30f; /* finite: differences are not NaN */
        total[t / LANES][t % LANES] = sinks ? 1 : 0;
    }
    for (int64_t d = 0; d < dim; d++)
        for (int t = 0; t < FLOAT_QUERIES; t++) w->queries[d * FLOAT_QUERIES + t] = own[t][d] * p->scale;
    memset(w->sums, 0, v_dim * FLOAT_QUERIES * sizeof(float));
    const int64_t lowest = p->positions[first / group], highest = p->positions[(first + count - 1) / group], window = p->window;
    for (int64_t start = window && lowest >= window ? (lowest - window + 1) / KEYS * KEYS : 0; start <= highest; start += KEYS) {
        const int64_t keys = p->keys - start < KEYS ? p->keys - start : KEYS;
        const float *k = all_k + start * p->k_stride + kv_head * dim;
        int64_t stride = p->k_stride;
        if (keys < KEYS) {
            memset(w->tail, 0, KEYS * dim * sizeof(float));
            for (int64_t i = 0; i < keys; i++) memcpy(w->tail + i * dim, k + i * stride, dim * sizeof(float));
            k = w->tail, stride = dim;
        }
        multiply_floats(w->logits, k, stride, 1, w->queries, KEYS, dim, 0);
        const int hides = start + KEYS - 1 > lowest || (window && start <= highest - window);
        for (int j = 0; j < FLOAT_VECTORS; j++) factors[j] = turn_to_weights(p, w->logits + j * LANES, start, hides, position[j], most + j, total + j);
        multiply_floats(w->sums, all_v + start * p->v_stride + kv_head * v_dim, 1, p->v_stride, w->logits, v_dim, keys, factors);
    }
    for (int t = 0; t < count; t++) {
        float *out = (float *)p->out + ((first + t) / group * p->heads + kv_head * group + (first + t) % group) * v_dim;
        const float by = 1 / total[t / LANES][t % LANES];
        for (int64_t d = 0; d < v_dim; d++) out[d] = w->sums[d * FLOAT_QUERIES + t] * by;
    }
}

/* Return 1 if memory is short, or the CPU or the compiler lacks the instructions. dim and v_dim: multiples of 8. */
int cb_float_attention(const Prefill *p) {
#if defined(__x86_64__) && !defined(PRODUCTS)
    return 1; /* torch is faster than vectors of 16 floats in registers of 4 */
#endif
    if (!has_fast()) return 1;
    const int64_t parts[] = {p->dim * FLOAT_QUERIES, KEYS * p->dim, KEYS * FLOAT_QUERIES, p->v_dim * FLOAT_QUERIES};
    const int64_t size = parts[0] + parts[1] + parts[2] + parts[3], tiles = (p->rows * (p->heads / p->kv_heads) + FLOAT_QUERIES - 1) / FLOAT_QUERIES;
    float *memory = aligned_alloc(64, (p->threads * size * sizeof(float) + 63) / 64 * 64);
    if (!memory) return 1;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
#ifdef _OPENMP
        float *mine = memory + omp_get_thread_num() * size;
#else
        float *mine = memory;
#endif
        const FloatWork work = {mine, mine + parts[0], mine + parts[0] + parts[1], mine + parts[0] + parts[1] + parts[2]};
#pragma omp for schedule(dynamic) /* the longest blocks first */
        for (int64_t i = p->kv_heads * tiles - 1; i >= 0; i--) attend_floats(p, i % p->kv_heads, i / p->kv_heads * FLOAT_QUERIES, &work);
    }
    free(memory);
    return 0;
}
