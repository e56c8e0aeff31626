/* Rows of GGUF tensors: codes of 32 values at a time, their scales and offsets, and whole rows restored to float32 or bfloat16.

   value = scale * code + offset. scale * code is exact in each kind, so that restored values equal the gguf package's to the bit,
   with a fused multiply-add or without. No byte outside a row's blocks is read. */

/* Numbers of GGMLQuantizationType. */
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
       IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39 };

enum { GROUP = 256, RUN = 32 }; /* values that are unpacked together: a K-quant's block or 8 blocks of 32; values of a vector of codes */

/* Instructions that restoring needs, and its inlined parts: call restore_row where has_fast. */
#ifdef AVX512
#define FAST AVX512(",avx2,fma,f16c")
#elif defined PRODUCTS
#define FAST __attribute__((target("avx2,fma,f16c")))
#else
#define FAST
#endif

static int has_fast(void) {
#ifdef AVX512
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined PRODUCTS
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

/* CALL(kind) for each kind of codes, with the kind as a constant */
#define EACH_KIND(CALL)                                                                                                             \
    case Q4_0: CALL(Q4_0); break;                                                                                                   \
    case Q4_1: CALL(Q4_1); break;                                                                                                   \
    case Q5_0: CALL(Q5_0); break;                                                                                                   \
    case Q5_1: CALL(Q5_1); break;                                                                                                   \
    case Q8_0: CALL(Q8_0); break;                                                                                                   \
    case Q2_K: CALL(Q2_K); break;                                                                                                   \
    case Q3_K: CALL(Q3_K); break;                                                                                                   \
    case Q4_K: CALL(Q4_K); break;                                                                                                   \
    case Q5_K: CALL(Q5_K); break;                                                                                                   \
    case Q6_K: CALL(Q6_K); break;                                                                                                   \
    case IQ4_NL: CALL(IQ4_NL); break;                                                                                               \
    case IQ4_XS: CALL(IQ4_XS); break;                                                                                               \
    case MXFP4: CALL(MXFP4); break;
/* and for each kind of plain numbers */
#define EACH_FLOAT_KIND(CALL)                                                                                                       \
    case F32: CALL(F32); break;                                                                                                     \
    case F16: CALL(F16); break;                                                                                                     \
    case BF16: CALL(BF16); break;

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint8_t bytes32 __attribute__((vector_size(32)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes8 __attribute__((vector_size(8)));
typedef uint16_t halves8 __attribute__((vector_size(16)));
typedef uint16_t halves16 __attribute__((vector_size(32)));
typedef uint32_t vecu8 __attribute__((vector_size(32)));
typedef int32_t veci8 __attribute__((vector_size(32)));

typedef struct {
    float scales[16], offsets[16]; /* of runs of 16 values (see is_fine) or of 32: then the first 8 count */
} Scales;

/* Return the values of a block; 0 for an unknown kind. */
INLINE int block_values(const int kind) {
    switch (kind) {
    case F32: case F16: case BF16: return 1;
    case Q4_0: case Q4_1: case Q5_0: case Q5_1: case Q8_0: case IQ4_NL: case MXFP4: return RUN;
    case Q2_K: case Q3_K: case Q4_K: case Q5_K: case Q6_K: case IQ4_XS: return GROUP;
    }
    return 0;
}

INLINE int block_bytes(const int kind) {
    switch (kind) {
    case F32: return 4;
    case F16: case BF16: return 2;
    case Q4_0: case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case MXFP4: return 17;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    case IQ4_XS: return 136;
    }
    return 0;
}

/* Whether codes are unsigned and have offsets; otherwise they are signed and have none. */
INLINE int has_offsets(const int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q2_K || kind == Q4_K || kind == Q5_K; }

/* What is subtracted from unsigned codes. */
INLINE int zero_of(const int kind) { return kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == Q3_K ? 4 : kind == Q6_K ? 32 : 0; }

/* Whether 16 values share a scale, not 32. */
INLINE int is_fine(const int kind) { return kind == Q2_K || kind == Q3_K || kind == Q6_K; }

#ifdef PRODUCTS
FAST INLINE vec8 from_halves8(halves8 h) { return (vec8)_mm256_cvtph_ps((__m128i)h); }
#if LANES == 16
FAST INLINE vec from_halves(halves h) { return (vec)_mm512_cvtph_ps((__m256i)h); }
#else
#define from_halves from_halves8
#endif
#else
#define FROM_HALVES(NAME, FLOATS, WORDS, HALVES)                                                                                    \
    INLINE FLOATS NAME(HALVES h) {                                                                                                  \
        const WORDS all = __builtin_convertvector(h, WORDS), size = all & 0x7fff, least = size * 0 + (113u << 23);                  \
        const WORDS small = (WORDS)((FLOATS)((size << 13) + least) - (FLOATS)least), is_small = (WORDS)(size < 0x400);              \
        const WORDS more = (WORDS)(size >= 0x7c00) & (112u << 23);                                                                  \
        return (FLOATS)((is_small & small) | (~is_small & ((size << 13) + (112u << 23) + more)) | (all & 0x8000) << 16);            \
    }
FROM_HALVES(from_halves, vec, vecu, halves)
FROM_HALVES(from_halves8, vec8, vecu8, halves8)
#endif

/* Return 8 whole numbers, signed bytes. */
FAST INLINE vec8 from_bytes8(const void *p) {
#ifdef PRODUCTS
    return (vec8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
#else
    signed_bytes8 x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, veci8), vec8);
#endif
}

/* Return LANES of 32 codes, from `at` on. */
FAST INLINE vec numbers_at(bytes32 codes, const int at, const int is_signed) {
#ifdef PRODUCTS
    __m128i part = at < 16 ? _mm256_castsi256_si128((__m256i)codes) : _mm256_extracti128_si256((__m256i)codes, 1);
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(part) : _mm512_cvtepu8_epi32(part));
#else
    if (at % 16) part = _mm_unpackhi_epi64(part, part);
    return (vec)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(part) : _mm256_cvtepu8_epi32(part));
#endif
#else
    if (is_signed) {
        signed_bytes x;
        memcpy(&x, (const uint8_t *)&codes + at, sizeof x);
        return __builtin_convertvector(__builtin_convertvector(x, veci), vec);
    }
    bytes x;
    memcpy(&x, (const uint8_t *)&codes + at, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, veci), vec);
#endif
}

INLINE uint16_t half(const uint8_t *p) {
    uint16_t x;
    memcpy(&x, p, 2);
    return x;
}

INLINE uint32_t word(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}

FAST INLINE bytes32 load32(const uint8_t *p) {
    bytes32 x;
    memcpy(&x, p, 32);
    return x;
}

FAST INLINE bytes32 joined(bytes16 a, bytes16 b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25,
                                   26, 27, 28, 29, 30, 31);
#else
    union { bytes16 parts[2]; bytes32 whole; } u = {{a, b}};
    return u.whole;
#endif
}

/* Bits of each byte from `shift` on: there is no shift of bytes. */
FAST INLINE bytes32 bits_of(bytes32 x, const int shift, const uint8_t mask) { return (bytes32)((halves16)x >> shift) & mask; }

FAST INLINE bytes32 nibbles(const uint8_t *p) {
    bytes16 x;
    memcpy(&x, p, 16);
    return joined(x, (bytes16)((halves8)x >> 4)) & 15;
}

/* Return 16 where a bit of x is set, in the order of the bits. */
FAST INLINE bytes32 fifth_bits(uint32_t x) {
    const bytes32 all = (bytes32)(x - (vecu8){0});
#define EIGHT(i) i, i, i, i, i, i, i, i
#ifdef __clang__
    const bytes32 each = __builtin_shufflevector(all, all, EIGHT(0), EIGHT(1), EIGHT(18), EIGHT(19));
#else
    const bytes32 each = __builtin_shuffle(all, (bytes32){EIGHT(0), EIGHT(1), EIGHT(18), EIGHT(19)});
#endif
#undef EIGHT
#define BITS 1, 2, 4, 8, 16, 32, 64, 128
    const bytes32 bits = {BITS, BITS, BITS, BITS};
#undef BITS
    return (bytes32)((each & bits) == bits) & 16;
}

FAST INLINE bytes32 looked_up(const int8_t *table, bytes32 codes) {
#ifdef PRODUCTS
    return (bytes32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table)), (__m256i)codes);
#else
    for (int i = 0; i < RUN; i++) codes[i] = (uint8_t)table[codes[i]];
    return codes;
#endif
}

static const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Return codes of a run of 32 values before zero_of is subtracted: unsigned, or signed where there is neither zero nor offset. */
FAST INLINE bytes32 stored_codes(const int kind, const uint8_t *p, const int run) {
    if (block_values(kind) == RUN) p += run * block_bytes(kind);
    switch (kind) {
    case Q4_0: return nibbles(p + 2);
    case Q4_1: return nibbles(p + 4);
    case Q5_0: return nibbles(p + 6) | fifth_bits(word(p + 2));
    case Q5_1: return nibbles(p + 8) | fifth_bits(word(p + 4));
    case Q8_0: return load32(p + 2);
    case Q2_K: return bits_of(load32(p + 16 + run / 4 * 32), run % 4 * 2, 3);
    case Q3_K: return bits_of(load32(p + 32 + run / 4 * 32), run % 4 * 2, 3) | (bits_of(load32(p), run, 1) << 2);
    case Q4_K: return bits_of(load32(p + 16 + run / 2 * 32), run % 2 * 4, 15);
    case Q5_K: return bits_of(load32(p + 48 + run / 2 * 32), run % 2 * 4, 15) | (bits_of(load32(p + 16), run, 1) << 4);
    case Q6_K:
        return bits_of(load32(p + run / 4 * 64 + run % 2 * 32), run / 2 % 2 * 4, 15) |
               (bits_of(load32(p + 128 + run / 4 * 32), run % 4 * 2, 3) << 4);
    case IQ4_NL: return looked_up(IQ4_VALUES, nibbles(p + 2));
    case IQ4_XS: return looked_up(IQ4_VALUES, nibbles(p + 8 + run * 16));
    default: return looked_up(MXFP4_VALUES, nibbles(p + 1));
    }
}

/* Return codes of a run of 32 values: signed or unsigned, see has_offsets. */
FAST INLINE bytes32 codes_of(const int kind, const uint8_t *p, const int run) { return stored_codes(kind, p, run) - (uint8_t)zero_of(kind); }

/* Store 8 whole numbers, the bytes of two words, times `by`. */
FAST INLINE void scaled(uint32_t low, uint32_t high, float zero, float by, float *out) {
    const uint64_t both = low | (uint64_t)high << 32;
    const vec8 x = (from_bytes8(&both) - zero) * by;
    memcpy(out, &x, sizeof x);
}

/* Return the scale of a block of 32 values. */
FAST INLINE float scale_of_block(const int kind, const uint8_t *p, float *offset) {
    if (kind == MXFP4) { /* a power of two, halved */
        const uint32_t bits = *p < 2 ? 0x200000u << *p : (uint32_t)(*p - 1) << 23;
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    const vec8 both = from_halves8((halves8){half(p), half(p + 2)}); /* every block has four bytes */
    if (has_offsets(kind)) *offset = both[1];
    return both[0];
}

/* Unpack scales and offsets of a group. whole: of a K-quant, scales are whole numbers, to be multiplied with `common`. */
FAST INLINE void unpack_scales(const int kind, const uint8_t *p, Scales *s, const int whole, float *common) {
    const uint32_t nibble = 0x0f0f0f0f, pair = 0x03030303;
    const int size = block_bytes(kind);
#define EACH_BLOCK(READ, at) {READ(p + at), READ(p + size + at), READ(p + 2 * size + at), READ(p + 3 * size + at), \
                              READ(p + 4 * size + at), READ(p + 5 * size + at), READ(p + 6 * size + at), READ(p + 7 * size + at)}
    if (kind == MXFP4) { /* powers of two, halved */
        const vecu8 e = EACH_BLOCK(*, 0), is_small = (vecu8)(e < 2);
        const vecu8 x = (is_small & (0x200000u << (e & 1))) | (~is_small & ((e - 1) << 23));
        memcpy(s->scales, &x, sizeof x);
    } else if (block_values(kind) == RUN) {
        const vec8 d = from_halves8((halves8)EACH_BLOCK(half, 0));
        memcpy(s->scales, &d, sizeof d);
        if (has_offsets(kind)) {
            const vec8 m = from_halves8((halves8)EACH_BLOCK(half, 2));
            memcpy(s->offsets, &m, sizeof m);
        }
#undef EACH_BLOCK
    } else {
        const uint8_t *at = p + (kind == Q6_K ? 208 : kind == Q3_K ? 108 : kind == Q2_K ? 80 : 0);
        const vec8 both = from_halves8((halves8){half(at), has_offsets(kind) ? half(at + 2) : 0});
        const float d = whole ? 1 : both[0], least = -both[1];
        *common = both[0];
        if (kind == Q6_K) {
            for (int i = 0; i < 16; i += 8) {
                const vec8 x = from_bytes8(p + 192 + i) * d;
                memcpy(s->scales + i, &x, sizeof x);
            }
        } else if (kind == Q2_K) {
            for (int i = 0; i < 16; i += 8) {
                const uint32_t a = word(p + i), b = word(p + i + 4);
                scaled(a & nibble, b & nibble, 0, d, s->scales + i);
                scaled(a >> 4 & nibble, b >> 4 & nibble, 0, least, s->offsets + i);
            }
        } else if (kind == Q3_K) {
            const uint32_t a = word(p + 96), b = word(p + 100), c = word(p + 104);
            scaled((a & nibble) | (c & pair) << 4, (b & nibble) | (c >> 2 & pair) << 4, 32, d, s->scales);
            scaled((a >> 4 & nibble) | (c >> 4 & pair) << 4, (b >> 4 & nibble) | (c >> 6 & pair) << 4, 32, d, s->scales + 8);
        } else if (kind == IQ4_XS) {
            uint64_t low = word(p + 4), high = half(p + 2);
            low = (low | low << 16) & 0x0000ffff0000ffff, low = (low | low << 8) & 0x00ff00ff00ff00ff; /* a nibble a byte */
            low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
            high = (high | high << 24) & 0x000000ff000000ff, high = (high | high << 12) & 0x000f000f000f000f; /* two bits a byte */
            high = (high | high << 6) & 0x0303030303030303;
            low |= high << 4;
            scaled((uint32_t)low, (uint32_t)(low >> 32), 32, d, s->scales);
        } else {
            const uint32_t a = word(p + 4), b = word(p + 8), c = word(p + 12);
            scaled(a & 0x3f3f3f3f, (c & nibble) | (a >> 6 & pair) << 4, 0, d, s->scales);
            scaled(b & 0x3f3f3f3f, (c >> 4 & nibble) | (b >> 6 & pair) << 4, 0, least, s->offsets);
        }
    }
}

FAST INLINE void scales_of(const int kind, const uint8_t *p, Scales *s) {
    float common;
    unpack_scales(kind, p, s, 0, &common);
}

/* A number in each lane, loaded so: GCC would put the numbers of several runs into one vector, and take it apart. */
FAST INLINE vec everywhere(const float *p) {
#if defined PRODUCTS && LANES == 16
    return (vec)_mm512_broadcastss_ps(_mm_load_ss(p));
#elif defined PRODUCTS
    return (vec)_mm256_broadcast_ss(p);
#else
    return splat(*p);
#endif
}

enum { BFLOAT16_BY_CPU = 2 }; /* type of `out`: bfloat16, rounded by AVX512-BF16, which takes subnormal numbers for 0 */

FAST INLINE void store_restored(void *p, int64_t i, vec x, const int type) {
#ifdef AVX512
    if (type == BFLOAT16_BY_CPU) {
        halves h;
        __asm__("vcvtneps2bf16 %1, %0" : "=v"(h) : "v"(x)); /* as an intrinsic it could not be inlined here */
        memcpy((uint16_t *)p + i, &h, sizeof h);
        return;
    }
#endif
    store(p, i, x, type);
}

FAST INLINE void restore_run(const int kind, const uint8_t *p, const Scales *s, const int run, void *out, int64_t at, const int type) {
    const bytes32 codes = codes_of(kind, p, run);
    _Pragma("GCC unroll 8") for (int i = 0; i < RUN; i += LANES) {
        const int scale = is_fine(kind) ? run * 2 + i / 16 : run;
        vec x = numbers_at(codes, i, !has_offsets(kind)) * everywhere(s->scales + scale);
        if (has_offsets(kind)) x += everywhere(s->offsets + scale);
        store_restored(out, at + i, x, type);
    }
}

/* Restore runs first..last-1 of a group. */
FAST INLINE void restore_group(const int kind, const uint8_t *p, int first, int last, void *out, const int type) {
    Scales s;
    scales_of(kind, p, &s);
    __asm__("" : "+m"(s)); /* they are loaded from memory, not taken out of vectors */
    if (first == 0 && last == 8)
        _Pragma("GCC unroll 8") for (int run = 0; run < 8; run++) restore_run(kind, p, &s, run, out, run * RUN, type);
    else
        for (int run = first; run < last; run++) restore_run(kind, p, &s, run, out, (run - first) * RUN, type);
}

FAST INLINE void restore_codes(const int kind, const uint8_t *row, int64_t first, int64_t count, char *out, const int type) {
    const int size = block_bytes(kind), width = type == FLOAT32 ? 4 : 2;
    if (block_values(kind) == RUN) {
        const uint8_t *p = row + first / RUN * size;
        for (; count >= GROUP; count -= GROUP, p += 8 * size, out += GROUP * width) restore_group(kind, p, 0, 8, out, type);
        if (count > 0) {
            uint8_t padded[8 * 34] = {0};
            memcpy(padded, p, count / RUN * size);
            restore_group(kind, padded, 0, count / RUN, out, type);
        }
        return;
    }
    while (count > 0) {
        const uint8_t *p = row + first / GROUP * size;
        const int at = first % GROUP, part = count < GROUP - at ? count : GROUP - at;
        if (part == GROUP)
            restore_group(kind, p, 0, 8, out, type);
        else
            restore_group(kind, p, at / RUN, (at + part) / RUN, out, type);
        first += part, count -= part, out += part * width;
    }
}

FAST INLINE vec load_numbers(const int kind, const uint8_t *p) {
    if (kind != F16) return load(p, 0, kind == F32 ? FLOAT32 : BFLOAT16);
    halves h;
    memcpy(&h, p, sizeof h);
    return from_halves(h);
}

FAST INLINE void restore_numbers(const int kind, const uint8_t *row, int64_t first, int64_t count, void *out, const int type) {
    const int size = block_bytes(kind);
    const uint8_t *p = row + first * size;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_restored(out, i, load_numbers(kind, p + i * size), type);
    if (i == count) return;
    uint8_t padded[4 * LANES] = {0};
    memcpy(padded, p + i * size, (count - i) * size);
    const vec rest = load_numbers(kind, padded);
    for (int j = 0; j < LANES; j++)
        if (i + j < count) put(out, i + j, rest[j], type);
}

#define RESTORE(KIND) restore_codes(KIND, row, first, count, (char *)out, TYPE)
#define RESTORE_NUMBERS(KIND) restore_numbers(KIND, row, first, count, out, TYPE)

/* Restore `count` values from `first` on of a row; both are multiples of 32, or any with F32, F16 and BF16. */
FAST static void restore_row(int kind, const uint8_t *row, int64_t first, int64_t count, float *out) {
    enum { TYPE = FLOAT32 };
    switch (kind) { EACH_KIND(RESTORE) EACH_FLOAT_KIND(RESTORE_NUMBERS) }
}

/* The same rounded to bfloat16, ties to even. */
FAST static void restore_row_bf16(int kind, const uint8_t *row, int64_t first, int64_t count, uint16_t *out) {
    enum { TYPE = BFLOAT16 };
    switch (kind) { EACH_KIND(RESTORE) EACH_FLOAT_KIND(RESTORE_NUMBERS) }
}

#ifdef AVX512
/* The same, faster, where the CPU has AVX512-BF16. */
FAST static void restore_row_by_cpu(int kind, const uint8_t *row, int64_t first, int64_t count, uint16_t *out) {
    enum { TYPE = BFLOAT16_BY_CPU };
    switch (kind) { EACH_KIND(RESTORE) EACH_FLOAT_KIND(RESTORE_NUMBERS) }
}
#endif
#undef RESTORE
#undef RESTORE_NUMBERS

typedef struct {
    const uint8_t *const *rows; /* [all]: address of each row */
    const uint8_t *kinds;       /* [all] */
    const int64_t *indices;     /* [count] */
    void *out;                  /* [count, width] */
    int64_t all, count, width;
    int32_t type, threads;
} Restoring;

static void restore_indexed(const Restoring *r, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
        const int64_t row = r->indices[i];
        if (r->type == FLOAT32)
            restore_row(r->kinds[row], r->rows[row], 0, r->width, (float *)r->out + i * r->width);
        else
            restore_row_bf16(r->kinds[row], r->rows[row], 0, r->width, (uint16_t *)r->out + i * r->width);
    }
}

/* Return 1 if the CPU lacks the instructions, or a kind is unknown or does not have rows of this width; 2 if there is no such row. */
int cb_restore_rows(const Restoring *r) {
    if (!has_fast()) return 1;
    for (int64_t i = 0; i < r->count; i++) {
        const int64_t row = r->indices[i];
        if (row < 0 || row >= r->all) return 2;
        const int values = block_values(r->kinds[row]);
        if (!values || r->width % values) return 1;
    }
    IN_PARTS(r->count, r->threads, restore_indexed(r, first, last));
    return 0;
}
