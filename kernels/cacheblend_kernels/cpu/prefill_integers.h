/* Products of many rows with codes of weights, in integers. Rows are rounded to 15 bits, with a scale for 128 values. A weight is its
   code, of K-quants times its whole scale within the block, so that it is exact. Up to 128 products are added up as whole numbers of
   32 bits; scales and offsets follow in float32. */

#ifdef PRODUCTS
enum { SPAN = 128, LARGEST = 16383 }; /* values of a row that share a scale; largest rounded value */

/* 256 values of a block of rows: value = scale * number. Zeros follow a row's last value and the last row. */
typedef struct RoundedRows {
    int16_t numbers[GROUP / 2][BLOCK][2];
    float scales[GROUP / SPAN][BLOCK];
    float sums[GROUP / RUN][BLOCK], sums_of_16[GROUP / 16][BLOCK]; /* of values */
} RoundedRows;

/* 256 weights of an output: weight = scale * number + offset. */
typedef struct {
    int16_t numbers[GROUP];
    float scales[GROUP / RUN], offsets[GROUP / 16]; /* of a run; of a run or of 16 values, see is_fine */
} WholeWeights;

/* Round at most 128 values of a row, and return their scale: NaN if a value is infinite or none. Values below 1e-34 become 0. */
INLINE float round_span(const PrefillProduct *p, int64_t from, int64_t values, int16_t *numbers) {
    vec sizes = {0};
    veci none = {0};
    for (int64_t i = 0; i < values; i += LANES) {
        const vec x = load(p->x, from + i, p->type);
        sizes = larger((vec)((veci)x & 0x7fffffff), sizes); /* NaN is not larger */
        none |= x != x;
    }
    float most = 1e-30f;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) most = sizes[i] > most ? sizes[i] : most, any |= none[i];
    const float by = LARGEST / most;
    for (int64_t i = 0; i < values; i += LANES) {
        const vec number = load(p->x, from + i, p->type) * by + 12582912.f; /* the nearest whole number in the last bits */
        const signed_halves some = __builtin_convertvector((veci)number - 0x4b400000, signed_halves);
        memcpy(numbers + i, &some, sizeof some);
    }
    return any || most == INFINITY ? NAN : most / LARGEST;
}

/* Store numbers of LANES rows, a row per lane, and the sums of their values. */
INLINE void store_rounded(const int16_t numbers[LANES][GROUP], int half, RoundedRows *to) {
    for (int pair = 0; pair < GROUP / 2; pair += LANES) {
        const vec scale = load(to->scales[2 * pair / SPAN], half, FLOAT32);
        vec words[LANES];
        for (int i = 0; i < LANES; i++) memcpy(words + i, numbers[i] + 2 * pair, sizeof words[i]);
        transpose(words);
        for (int i = 0; i < LANES; i++) store((float *)to->numbers[pair + i], half, words[i], FLOAT32);
        for (int i = 0; i < LANES; i += 8) {
            veci sum = {0};
            for (int j = i; j < i + 8; j++) sum += ((veci)words[j] << 16 >> 16) + ((veci)words[j] >> 16);
            store(to->sums_of_16[(pair + i) / 8], half, __builtin_convertvector(sum, vec) * scale, FLOAT32);
        }
    }
    for (int run = 0; run < GROUP / RUN; run++)
        store(to->sums[run], half, load(to->sums_of_16[2 * run], half, FLOAT32) + load(to->sums_of_16[2 * run + 1], half, FLOAT32), FLOAT32);
}

/* Round a block of rows: [groups]. */
CLONES static void round_block(const PrefillProduct *p, const Packed *packed, int64_t block) {
    for (int64_t group = 0; group < packed->groups; group++)
        for (int half = 0; half < BLOCK; half += LANES) {
            RoundedRows *to = packed->rounded + block * packed->groups + group;
            int16_t numbers[LANES][GROUP] = {{0}};
            for (int span = 0; span < GROUP / SPAN; span++) {
                const int64_t at = group * GROUP + span * SPAN, values = p->width - at < SPAN ? p->width - at : SPAN;
                for (int i = 0; i < LANES; i++) {
                    const int64_t row = block * BLOCK + half + i;
                    to->scales[span][half + i] =
                        row < packed->rows ? round_span(p, (packed->first_row + row) * p->width + at, values, numbers[i] + span * SPAN) : 0;
                }
            }
            store_rounded(numbers, half, to);
        }
}

FAST INLINE void unpack_group(const int kind, const uint8_t *p, WholeWeights *to) {
    Scales s;
    float common;
    int32_t whole[16];
    unpack_scales(kind, p, &s, 1, &common);
    if (block_values(kind) == GROUP)
        for (int i = 0; i < (is_fine(kind) ? 16 : 8); i += 8)
            _mm256_storeu_si256((void *)(whole + i), _mm256_cvtps_epi32(_mm256_loadu_ps(s.scales + i)));
    __asm__("" : "+m"(whole)); /* they are loaded from memory, not taken out of vectors */
    _Pragma("GCC unroll 8") for (int run = 0; run < GROUP / RUN; run++) {
        const __m256i codes = (__m256i)codes_of(kind, p, run);
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
            const __m128i some = i ? _mm256_extracti128_si256(codes, 1) : _mm256_castsi256_si128(codes);
            __m256i numbers = has_offsets(kind) ? _mm256_cvtepu8_epi16(some) : _mm256_cvtepi8_epi16(some);
            if (block_values(kind) == GROUP)
                numbers = _mm256_mullo_epi16(numbers, _mm256_set1_epi16((short)whole[is_fine(kind) ? run * 2 + i : run]));
            _mm256_storeu_si256((void *)(to->numbers + run * RUN + i * 16), numbers);
        }
        to->scales[run] = block_values(kind) == GROUP ? common : s.scales[run];
    }
    if (has_offsets(kind)) memcpy(to->offsets, s.offsets, is_fine(kind) ? 64 : 32);
}

#define UNPACK(KIND) unpack_group(KIND, p, to)
/* Unpack `count` weights of a row from `first` on, a group or what is left of the row. */
FAST static void unpack_weights(int kind, const uint8_t *row, int64_t first, int64_t count, WholeWeights *to) {
    const uint8_t *p = row + first / block_values(kind) * block_bytes(kind);
    uint8_t padded[8 * 34] = {0};
    if (count < GROUP) p = memcpy(padded, p, count / RUN * block_bytes(kind));
    switch (kind) { EACH_KIND(UNPACK) }
}
#undef UNPACK

/* How many runs are added up as whole numbers: |weight * value| times their values stays below 2^31. */
INLINE int runs_together(int kind) {
    if (kind == Q2_K || kind == Q3_K || kind == Q4_K) return 4; /* |weight| <= 45, 128, 945 */
    return kind == Q5_K ? 2 : 1; /* 1,953; 4,096 of Q6_K; other runs have scales of their own */
}

/* Define NAME(sums, weights, x, runs, together, rows): sums [COUNT, BLOCK] += scales * (numbers x), for WholeWeights of COUNT outputs that
   are STRIDE floats apart. runs: of 32 values. */
#define ACCUMULATE_INTEGERS(NAME, FEATURES, COUNT, STEP)                                                                                \
    FEATURES INLINE void NAME##_with(float *sums, const float *weights, const RoundedRows *x, int64_t runs, int64_t together,           \
                                     const int vectors) {                                                                               \
        const float *scales = weights + GROUP / 2;                                                                                      \
        for (int64_t run = 0; run < runs; run += together) {                                                                            \
            veci sum[COUNT][2];                                                                                                         \
            EACH_SUM(COUNT) sum[i][j] = (veci){0};                                                                                      \
            _Pragma("GCC unroll 2") for (int64_t k = run * (RUN / 2); k < (run + together) * (RUN / 2); k++) {                          \
                vec right[2];                                                                                                           \
                _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++) right[j] = load(x->numbers[k], j * LANES, FLOAT32);           \
                EACH_SUM(COUNT) sum[i][j] = STEP(sum[i][j], weights + i * STRIDE + k, right[j]);                                        \
            }                                                                                                                           \
            vec by[2];                                                                                                                  \
            _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++) by[j] = load(x->scales[run * RUN / SPAN], j * LANES, FLOAT32);    \
            EACH_SUM(COUNT) {                                                                                                           \
                const vec scale = by[j] * everywhere(scales + i * STRIDE + run), before = load(sums, i * BLOCK + j * LANES, FLOAT32);   \
                store(sums, i * BLOCK + j * LANES, before + __builtin_convertvector(sum[i][j], vec) * scale, FLOAT32);                  \
            }                                                                                                                           \
        }                                                                                                                               \
    }                                                                                                                                   \
    FEATURES static void NAME(float *sums, const float *weights, const RoundedRows *x, int64_t runs, int64_t together, int64_t rows) {  \
        if (rows > LANES)                                                                                                               \
            NAME##_with(sums, weights, x, runs, together, 2);                                                                           \
        else                                                                                                                            \
            NAME##_with(sums, weights, x, runs, together, 1);                                                                           \
    }
#define EACH_SUM(COUNT) _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) _Pragma("GCC unroll 2") for (int j = 0; j < vectors; j++)

typedef void (*AccumulateIntegers)(float *, const float *, const RoundedRows *, int64_t, int64_t, int64_t);

#ifdef AVX512
#define STEP_VNNI(sum, w, x) (veci)_mm512_dpwssd_epi32((__m512i)(sum), (__m512i)(x), (__m512i)everywhere(w))
ACCUMULATE_INTEGERS(accumulate_vnni, AVX512(",avx2,fma,f16c,avx512vnni"), OUTPUTS_TOGETHER, STEP_VNNI)
#else
#define STEP_MADD(sum, w, x) (veci)_mm256_add_epi32((__m256i)(sum), _mm256_madd_epi16((__m256i)(x), (__m256i)everywhere(w)))
ACCUMULATE_INTEGERS(accumulate_madd, FAST, OUTPUTS_TOGETHER, STEP_MADD)
#if __GNUC__ >= 11
#define STEP_VNNI(sum, w, x) (veci)_mm256_dpwssd_avx_epi32((__m256i)(sum), (__m256i)(x), (__m256i)everywhere(w))
ACCUMULATE_INTEGERS(accumulate_vnni, __attribute__((target("avx2,fma,f16c,avxvnni"))), OUTPUTS_TOGETHER, STEP_VNNI)
#endif
#endif

/* Return the function that multiplies in integers this way; null if the CPU lacks the instructions. */
static AccumulateIntegers accumulate_integers_of(int way) {
#ifdef AVX512
    if (way == INTEGERS_BY_VNNI && __builtin_cpu_supports("avx512vnni")) return accumulate_vnni;
#else
#if __GNUC__ >= 11
    if (way == INTEGERS_BY_VNNI && __builtin_cpu_supports("avxvnni")) return accumulate_vnni;
#endif
    if (way == INTEGERS) return accumulate_madd;
#endif
    return 0;
}

/* sums [OUTPUTS_TOGETHER, BLOCK] += weights x, for outputs of a kind: WholeWeights that are STRIDE floats apart, of a group or less. */
static void accumulate_codes(const PrefillProduct *p, float *sums, const float *weights, const RoundedRows *x, int64_t values, int kind,
                             int64_t rows) {
    const float *offsets = weights + offsetof(WholeWeights, offsets) / sizeof(float);
    accumulate_integers_of(p->way)(sums, weights, x, values / RUN, runs_together(kind), rows);
    if (has_offsets(kind) && is_fine(kind)) accumulate_floats(sums, offsets, x->sums_of_16[0], values / 16, rows);
    if (has_offsets(kind) && !is_fine(kind)) accumulate_floats(sums, offsets, x->sums[0], values / RUN, rows);
}
#else
typedef struct RoundedRows { float none; } RoundedRows;
#define unpack_weights(...) ((void)0)
#define round_block(...) ((void)0)
#define accumulate_codes(...) ((void)0)
#endif
