/* Load stored few-bit KV into the pool: unpack the codes, look up levels, invert the Hadamard transform, add the mean, rotate. The layout is
   that of StoredKV (interface.py). */

enum { MAX_CODES = 1024 };

typedef struct {
    const uint8_t *k, *v;            /* [rows, heads, bytes] */
    const uint16_t *k_scale, *v_scale; /* [rows, heads] bfloat16 */
    const uint16_t *mean;            /* [heads, k_dim] bfloat16 */
    const float *k_levels, *v_levels; /* [2^bits] */
    const float *cos, *sin;          /* [rows, k_dim], both halves equal */
    const int64_t *slots;            /* [rows]; not read if first >= 0: the slots are then first, first + 1, ... */
    void *k_pool, *v_pool;           /* [num_slots, heads, dim] */
    int64_t rows, heads, k_dim, v_dim, num_slots, first;
    int32_t k_bits, v_bits, type, threads;
} Codes;

INLINE int64_t plane_bytes(int64_t dim, int plane) { return (dim * plane + 7) / 8; }

/* A code is split into planes of 4, 2 and 1 bits. */
INLINE int64_t code_bytes(int64_t dim, const int bits) {
    return (bits & 4 ? plane_bytes(dim, 4) : 0) + (bits & 2 ? plane_bytes(dim, 2) : 0) + (bits & 1 ? plane_bytes(dim, 1) : 0);
}

/* Unpack the codes of one plane. Writes up to 8 codes beyond dim. */
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
    if (1 << bits <= LANES) { /* all levels fit a register */
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

/* Sums and differences of adjacent runs of `step` values within a vector. */
INLINE vec butterfly(vec x, const int step) {
    veci pattern, sign;
    for (int i = 0; i < LANES; i++) {
        pattern[i] = i ^ step;
        sign[i] = i & step ? INT32_MIN : 0;
    }
    return (vec)((veci)x ^ sign) + SHUFFLED(x, pattern);
}

/* Transform a head as torch_backend.mixed does, without its factor. y needs room for LANES more values, which are ignored. */
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
    to_levels(codes, y, levels, scale, dim, bits);
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

/* of_latents: codecs with equal bits for K and V, as for latent attention; widths are neither 64 nor 128. */
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
LOAD_CODES(7, 6, 0)
LOAD_CODES(5, 3, 0)
LOAD_CODES(7, 7, 1)
LOAD_CODES(4, 4, 1)

typedef void (*Loading)(const Codes *, int64_t, int64_t);

static Loading loading(const Codes *c) {
    switch (10 * c->k_bits + c->v_bits) {
    case 77: return load_codes_77;
    case 76: return load_codes_76;
    case 53: return load_codes_53;
    case 44: return load_codes_44;
    default: return 0;
    }
}

/* Return 1, before anything is written, if a slot is outside the pool; 2 for bits that no codec has. */
int cb_load_codes(const Codes *c) {
    const Loading load = loading(c);
    if (!load) return 2;
    if (c->first >= 0 && c->first + c->rows > c->num_slots) return 1;
    for (int64_t row = 0; c->first < 0 && row < c->rows; row++)
        if (c->slots[row] < 0 || c->slots[row] >= c->num_slots) return 1;
    IN_PARTS(c->rows, c->threads, load(c, first, last));
    return 0;
}
