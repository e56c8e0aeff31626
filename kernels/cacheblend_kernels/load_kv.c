/* Stored K and V into the pool on a CPU, in one pass: dequantise, rotate K, scatter. What KernelBackend.load_kv says,
   for pools of fp32; compiled_load.py checks what it is given. It needs nothing of Python, and is not called under its
   interpreter lock. */

#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* glibc picks the version that the processor is fastest with when the library is loaded */
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx2,fma", "default")))
#else
#define FOR_EVERY_CPU
#endif

enum form { FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3, CODES8, CODES4 };

#define MAX_HEAD_DIM 1024

struct stored {
    const void *k, *v;                                      /* [num_rows, num_heads, head_dim], CODES4: head_dim / 2 */
    const float *k_scale, *k_zero, *v_scale, *v_zero;       /* NULL where the form has none */
};

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Exponents of the short formats begin at 2^-14 and 2^-6, that of fp32 at 2^-126: the product moves normal and subnormal
   values alike. */
static inline float from_float16(uint16_t code) {
    uint32_t rest = code & 0x7fff, bits = as_bits(as_float(rest << 13) * 0x1p112f);
    return as_float((rest >= 0x7c00 ? bits | 0x7f800000u : bits) | (uint32_t)(code & 0x8000) << 16);
}

static inline float from_float8(uint8_t code) {
    uint32_t rest = code & 0x7f, nan = (rest + 1) >> 7; /* by a sum, with which it vectorises */
    return as_float(as_bits(as_float(rest << 20) * 0x1p120f) | nan * 0x7fc00000u | (uint32_t)(code & 0x80) << 24);
}

/* head_dim values of one row and head, beginning at element `at`, without their scales */
static inline void read_values(enum form form, const void *from, int64_t at, int64_t head_dim, float *restrict out) {
    const uint16_t *restrict wide = (const uint16_t *)from + at;
    const uint8_t *restrict narrow = (const uint8_t *)from + (form == CODES4 ? at / 2 : at);
    switch (form) {
    case FLOAT32:
        memcpy(out, (const float *)from + at, (size_t)head_dim * sizeof *out);
        break;
    case BFLOAT16:
        for (int64_t i = 0; i < head_dim; i++) out[i] = as_float((uint32_t)wide[i] << 16);
        break;
    case FLOAT16:
        for (int64_t i = 0; i < head_dim; i++) out[i] = from_float16(wide[i]);
        break;
    case FLOAT8_E4M3:
        for (int64_t i = 0; i < head_dim; i++) out[i] = from_float8(narrow[i]);
        break;
    case CODES8:
        for (int64_t i = 0; i < head_dim; i++) out[i] = (float)narrow[i];
        break;
    case CODES4:
        for (int64_t i = 0; i < head_dim / 2; i++) {
            out[2 * i] = (float)(narrow[i] & 15);
            out[2 * i + 1] = (float)(narrow[i] >> 4);
        }
        break;
    }
}

/* out = x * cos + rotate_half(x) * sin; both halves of a row of cos, and of sin, are the same */
static inline void rotate(const float *restrict x, const float *restrict cos, const float *restrict sin, int64_t head_dim,
                          float *restrict out) {
    int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        out[i] = low * cos[i] - high * sin[i];
        out[i + half] = high * cos[i] + low * sin[i];
    }
}

/* cos, sin: [num_rows, head_dim]. k_pool, v_pool: [num_slots, num_heads, head_dim]. slots: [num_rows], or NULL for
   first_slot, first_slot + 1, ... Returns 0; -1, with nothing written, when a slot is not of the pool. The number in the
   name changes with the parameters, so that no other version is called by mistake. */
FOR_EVERY_CPU EXPORT int cacheblend_load_kv_1(int form, const struct stored *from, int64_t num_rows, int64_t num_heads,
                                            int64_t head_dim, int64_t group_size, const float *cos, const float *sin,
                                            float *k_pool, float *v_pool, int64_t num_slots, const int64_t *slots,
                                            int64_t first_slot) {
    int64_t row_values = num_heads * head_dim;
    float values[MAX_HEAD_DIM];
    if (head_dim > MAX_HEAD_DIM) return -1;
    if (slots == NULL && (first_slot < 0 || first_slot > num_slots - num_rows)) return -1;
    for (int64_t row = 0; slots != NULL && row < num_rows; row++)
        if (slots[row] < 0 || slots[row] >= num_slots) return -1;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = slots == NULL ? first_slot + row : slots[row];
        for (int64_t head = 0; head < num_heads; head++) {
            int64_t at = row * row_values + head * head_dim, to = slot * row_values + head * head_dim;
            if (form == FLOAT32) {
                rotate((const float *)from->k + at, cos + row * head_dim, sin + row * head_dim, head_dim, k_pool + to);
                continue;
            }
            read_values(form, from->k, at, head_dim, values);
            if (form == FLOAT8_E4M3) {
                for (int64_t i = 0; i < head_dim; i++) values[i] *= from->k_scale[head];
            } else if (form == CODES8 || form == CODES4) {
                int64_t group = row / group_size * row_values + head * head_dim;
                const float *restrict scale = from->k_scale + group, *restrict zero = from->k_zero + group;
                for (int64_t i = 0; i < head_dim; i++) values[i] = values[i] * scale[i] + zero[i];
            }
            rotate(values, cos + row * head_dim, sin + row * head_dim, head_dim, k_pool + to);
        }
        for (int64_t head = 0; head < num_heads; head++) {
            int64_t at = row * row_values + head * head_dim;
            float *restrict out = v_pool + slot * row_values + head * head_dim;
            read_values(form, from->v, at, head_dim, out);
            if (form == FLOAT8_E4M3) {
                for (int64_t i = 0; i < head_dim; i++) out[i] *= from->v_scale[head];
            } else if (form == CODES8 || form == CODES4) {
                float scale = from->v_scale[row * num_heads + head], zero = from->v_zero[row * num_heads + head];
                for (int64_t i = 0; i < head_dim; i++) out[i] = out[i] * scale + zero;
            }
        }
    }
    return 0;
}
