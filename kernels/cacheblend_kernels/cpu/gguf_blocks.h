/* Dequantise blocks of a GGUF file to float32, bit-identical to the gguf package: products and sums are rounded separately. */

typedef struct {
    const uint8_t *blocks;
    float *out;
    int64_t count; /* blocks */
    int32_t kind, threads;
} Blocks;

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 }; /* GGMLQuantizationType */

/* Keep the compiler from fusing the products in an array with the sums that follow. */
#define ROUNDED(array) __asm__("" : "+m"(array))

INLINE float from_half(const uint8_t *p) {
    const uint32_t h = (uint32_t)p[0] | (uint32_t)p[1] << 8, sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    union { uint32_t bits; float x; } u;
    if (exponent == 0) {
        u.x = (float)mantissa * 0x1p-24f;
        u.bits |= sign;
    } else
        u.bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    return u.x;
}

/* Unpack 32 codes of 4 bits, with a fifth bit from `high`. */
INLINE void codes_of_32(const uint8_t *restrict nibbles, uint32_t high, uint8_t *restrict codes, const int five) {
    for (int j = 0; j < 16; j++) {
        codes[j] = nibbles[j] & 15;
        codes[j + 16] = nibbles[j] >> 4;
    }
    if (five)
        for (int j = 0; j < 32; j++) codes[j] |= (high >> j & 1) << 4;
}

INLINE uint32_t word(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}

INLINE void scaled(const uint8_t *restrict codes, float *restrict out, float scale, int zero, int count) {
    for (int j = 0; j < count; j++) out[j] = scale * (float)((int)codes[j] - zero);
}

INLINE void scaled_and_moved(const uint8_t *restrict codes, float *restrict out, float scale, float by) {
    float product[32];
    for (int j = 0; j < 32; j++) product[j] = scale * (float)codes[j];
    ROUNDED(product);
    for (int j = 0; j < 32; j++) out[j] = product[j] + by;
}

/* Scale and minimum of a run of 32 values, 6 bits each. */
INLINE void scale_and_min(const uint8_t *s, int run, int *scale, int *min) {
    const int j = run & 3;
    if (run < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 8] & 15) | (s[j] >> 2 & 0x30);
        *min = s[j + 8] >> 4 | (s[j + 4] >> 2 & 0x30);
    }
}

INLINE void restore_blocks(const Blocks *b, int64_t first, int64_t last, const int kind, const int size, const int values) {
    uint8_t codes[256];
    for (int64_t i = first; i < last; i++) {
        const uint8_t *p = b->blocks + i * size;
        float *restrict out = b->out + i * values;
        if (kind == Q8_0) {
            const float scale = from_half(p);
            for (int j = 0; j < 32; j++) out[j] = scale * (float)(int8_t)p[2 + j];
        } else if (kind == Q4_0 || kind == Q5_0) {
            codes_of_32(p + (kind == Q4_0 ? 2 : 6), kind == Q4_0 ? 0 : word(p + 2), codes, kind == Q5_0);
            scaled(codes, out, from_half(p), kind == Q4_0 ? 8 : 16, 32);
        } else if (kind == Q4_1 || kind == Q5_1) {
            codes_of_32(p + (kind == Q4_1 ? 4 : 8), kind == Q4_1 ? 0 : word(p + 4), codes, kind == Q5_1);
            scaled_and_moved(codes, out, from_half(p), from_half(p + 2));
        } else if (kind == Q6_K) {
            const float d = from_half(p + 208);
            for (int part = 0; part < 2; part++)
                for (int run = 0; run < 4; run++)
                    for (int j = 0; j < 32; j++)
                        codes[part * 128 + run * 32 + j] = (p[part * 64 + (run & 1) * 32 + j] >> (run & 2) * 2 & 15) |
                                                           (p[128 + part * 32 + j] >> run * 2 & 3) << 4;
            for (int run = 0; run < 16; run++) scaled(codes + run * 16, out + run * 16, d * (float)(int8_t)p[192 + run], 32, 16);
        } else {
            const float d = from_half(p), least = from_half(p + 2);
            const uint8_t *low = p + (kind == Q4_K ? 16 : 48);
            for (int run = 0; run < 8; run++) {
                int scale, min;
                scale_and_min(p + 4, run, &scale, &min);
                for (int j = 0; j < 32; j++) {
                    codes[j] = low[run / 2 * 32 + j] >> (run & 1) * 4 & 15;
                    if (kind == Q5_K) codes[j] |= (p[16 + j] >> run & 1) << 4;
                }
                float by[1] = {least * (float)min};
                ROUNDED(by);
                scaled_and_moved(codes, out + run * 32, d * (float)scale, -by[0]);
            }
        }
    }
}

CLONES static void restore_part(const Blocks *b, int64_t first, int64_t last) {
    switch (b->kind) {
    case Q4_0: restore_blocks(b, first, last, Q4_0, 18, 32); break;
    case Q4_1: restore_blocks(b, first, last, Q4_1, 20, 32); break;
    case Q5_0: restore_blocks(b, first, last, Q5_0, 22, 32); break;
    case Q5_1: restore_blocks(b, first, last, Q5_1, 24, 32); break;
    case Q8_0: restore_blocks(b, first, last, Q8_0, 34, 32); break;
    case Q4_K: restore_blocks(b, first, last, Q4_K, 144, 256); break;
    case Q5_K: restore_blocks(b, first, last, Q5_K, 176, 256); break;
    case Q6_K: restore_blocks(b, first, last, Q6_K, 210, 256); break;
    }
}

void cb_gguf_blocks(const Blocks *b) {
    IN_PARTS(b->count, b->threads, restore_part(b, first, last));
}
