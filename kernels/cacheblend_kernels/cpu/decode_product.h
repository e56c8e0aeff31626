/* Products of a few rows with weights in the blocks of a GGUF file, each read once for 4 rows, or 8. With blocks of codes, rows are
   rounded to whole numbers of 15 bits, with a scale for 32 values; with F32, F16 and BF16 they are not. A row's result depends neither
   on other rows nor on threads. */

/* rows for which a block is unpacked once, with vectors of 512 bits too; outputs that stay cached from rows to rows */
enum { TOGETHER = 4, MOST_TOGETHER = 8, AT_A_TIME = 8 };

typedef struct {
    const void *x;              /* [rows, width], fp32 or bf16 */
    const uint8_t *const *weight; /* [outputs]: address of each output's row */
    const uint8_t *kinds;       /* [outputs] */
    const void *bias;           /* [outputs] of bias_type; may be null */
    void *out;                  /* [rows, outputs] of x's type */
    int64_t rows, width, outputs;
    float factor;               /* out = factor * product + bias */
    int32_t type, bias_type, vnni, threads; /* vnni: 0 to do without */
} DecodeProduct;

/* 256 values of a row: value = scale * (128 * high + low), |high| <= 127, -64 <= low < 64. Zeros follow the row's last value. */
enum { MOST = 127 * 128 };
typedef struct {
    int8_t high[GROUP], low[GROUP];
    float scales[8], sums[8], sums_of_16[16]; /* sums: of scale * code over 32 and over 16 values */
} Rounded;

/* 256 values of two rows, in 16 words of 32 bits a run: word i belongs to row i % 2 and to values 4 k to 4 k + 3, where k = LANE(i).
   The scales of a run (of its first half for both rows, then of its second half) thus repeat every 128 bits. */
#define LANE(i) ((i) / 4 + (i) / 2 % 2 * 4)
typedef struct {
    int16_t even[8][32], odd[8][32]; /* of each run: values 4 k and 4 k + 2 of a word; values 4 k + 1 and 4 k + 3 */
    float scales[32], sums[16], sums_of_16[32]; /* scales: [run, half, row]; sums: in the order of words */
} TwoRows;

typedef struct {
    const DecodeProduct *given;
    Rounded *groups; /* [rows, num_groups], or null without blocks of codes */
    TwoRows *pairs;  /* [(rows + 1) / 2, num_groups], or null; a last row without a partner is there twice */
    float *numbers;  /* [rows, num_numbers], or null without plain numbers; zeros follow a row's last value */
    int64_t num_groups, num_numbers;
} Prepared;

CLONES static void prepare_rows(const Prepared *p, int64_t first, int64_t last) {
    const DecodeProduct *given = p->given;
    for (int64_t row = first; row < last; row++) {
        float *numbers = p->numbers ? p->numbers + row * p->num_numbers : 0;
        for (int64_t i = 0; numbers && i < p->num_numbers; i++)
            numbers[i] = i < given->width ? value_at(given->x, row * given->width + i, given->type) : 0;
        for (int64_t group = 0; p->groups && group < p->num_groups; group++) {
            Rounded *to = p->groups + row * p->num_groups + group;
            for (int run = 0; run < 8; run++) {
                const int64_t at = group * GROUP + run * RUN;
                vec x[RUN / LANES] = {{0}}, sizes = {0}, sums[2] = {{0}};
                for (int i = 0; i < RUN / LANES && at < given->width; i++) {
                    x[i] = load(given->x, row * given->width + at + i * LANES, given->type);
                    sizes = larger((vec)((veci)x[i] & 0x7fffffff), sizes); /* NaN is not larger */
                }
                float most = 1e-30f;
                for (int i = 0; i < LANES; i++) most = sizes[i] > most ? sizes[i] : most;
                const float by = MOST / most;
                for (int i = 0; i < RUN / LANES; i++) {
                    const vec code = x[i] * by + 12582912.f; /* the nearest whole number in the last bits */
                    const veci all = (veci)code - 0x4b400000, high = (all + 64) >> 7;
                    const signed_bytes highs = __builtin_convertvector(high, signed_bytes);
                    const signed_bytes lows = __builtin_convertvector(all - 128 * high, signed_bytes);
                    memcpy(to->high + run * RUN + i * LANES, &highs, sizeof highs);
                    memcpy(to->low + run * RUN + i * LANES, &lows, sizeof lows);
                    sums[i * LANES / 16] += code - 12582912.f; /* exact: whole numbers of less than 24 bits */
                }
                const float left = sum(sums[0]), right = sum(sums[1]), both = left + right;
                to->scales[run] = both != both ? NAN : most / MOST;
                to->sums[run] = to->scales[run] * both;
                to->sums_of_16[run * 2] = to->scales[run] * left;
                to->sums_of_16[run * 2 + 1] = to->scales[run] * right;
            }
        }
    }
}

#ifdef AVX512
AVX512(",avx2") static void interleave_rows(const Prepared *p, int64_t first, int64_t last) {
    int16_t from[32]; /* where a word of `even` is in two rows' values */
    for (int i = 0; i < 32; i++) from[i] = (int16_t)(i / 2 % 2 * 32 + LANE(i / 2) * 4 + i % 2 * 2);
    const __m512i even = _mm512_loadu_si512(from), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    for (int64_t pair = first; pair < last; pair++)
        for (int64_t group = 0; group < p->num_groups; group++) {
            TwoRows *to = p->pairs + pair * p->num_groups + group;
            const Rounded *rows[2] = {p->groups + 2 * pair * p->num_groups + group};
            rows[1] = rows[0] + (2 * pair + 1 < p->given->rows ? p->num_groups : 0);
            for (int run = 0; run < 8; run++) {
                __m512i codes[2];
                for (int r = 0; r < 2; r++) {
                    const __m512i high = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(rows[r]->high + run * RUN)));
                    const __m512i low = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(rows[r]->low + run * RUN)));
                    codes[r] = _mm512_add_epi16(_mm512_slli_epi16(high, 7), low);
                }
                _mm512_storeu_si512(to->even[run], _mm512_permutex2var_epi16(codes[0], even, codes[1]));
                _mm512_storeu_si512(to->odd[run], _mm512_permutex2var_epi16(codes[0], odd, codes[1]));
            }
            for (int i = 0; i < 32; i++) {
                to->scales[i] = rows[i % 2]->scales[i / 4];
                to->sums_of_16[i] = rows[i % 2]->sums_of_16[i / 16 * 8 + LANE(i % 16)];
                if (i < 16) to->sums[i] = rows[i % 2]->sums[LANE(i)];
            }
        }
}
#endif

static void prepare_pairs(const Prepared *p, int64_t first, int64_t last) {
    prepare_rows(p, 2 * first, 2 * last < p->given->rows ? 2 * last : p->given->rows);
#ifdef AVX512
    if (p->pairs) interleave_rows(p, first, last);
#endif
}

INLINE void finish_row(const DecodeProduct *given, int64_t row, int64_t output, float sum) {
    const float bias = given->bias ? value_at(given->bias, output, given->bias_type) : 0;
    put(given->out, row * given->outputs + output, fmaf(sum, given->factor, bias), given->type);
}

#define EACH_OUTPUT(NAME, COUNT)                                                                                                    \
    for (int64_t at = first; at < last; at += AT_A_TIME)                                                                            \
        for (int64_t row = 0; row < p->given->rows; row += COUNT)                                                                   \
            for (int64_t output = at; output < last && output < at + AT_A_TIME; output++)                                           \
                NAME(p, row, p->given->rows - row < COUNT ? p->given->rows - row : COUNT, output);

/* Fetch what is read in a while: a core's own prefetching leaves half of the memory's bandwidth unused. */
enum { WEIGHTS_AHEAD = 4096 };
#define READ_AHEAD(p, size)                                                                                                         \
    for (int line_ = 0; line_ < (size); line_ += 64) __builtin_prefetch((p) + WEIGHTS_AHEAD + line_);

#ifdef PRODUCTS
/* What is subtracted from unsigned codes, those included that are read as 128 more than signed ones. */
INLINE int zero_with(const int kind, const int shifts) { return shifts && !has_offsets(kind) && !zero_of(kind) ? 128 : zero_of(kind); }

#define ALL(r, count) _Pragma("GCC unroll 8") for (int r = 0; r < (count); r++)
/* Rows of a constant `count`, of which `rows` are given: the last one is repeated, and its copies are not stored. */
#define GIVEN(r) ((r) < rows ? (r) : rows - 1)

FAST INLINE float total_of(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

FAST INLINE vec plain_numbers(const int kind, const uint8_t *p) {
    halves h;
    if (kind != F16) return load(p, 0, kind == F32 ? FLOAT32 : BFLOAT16);
    memcpy(&h, p, sizeof h);
    return from_halves(h);
}

FAST INLINE void product_of_numbers(const Prepared *p, int64_t row, const int count, int64_t rows, int64_t output, const int kind) {
    const int size = block_bytes(kind);
    const uint8_t *w = p->given->weight[output];
    const float *x[MOST_TOGETHER];
    vec totals[MOST_TOGETHER][16 / LANES];
    ALL(r, count) x[r] = p->numbers + (row + GIVEN(r)) * p->num_numbers;
    ALL(r, count) ALL(part, 16 / LANES) totals[r][part] = (vec){0};
    uint8_t room[64] = {0};
    for (int64_t k = 0; k < p->num_numbers; k += 16, w += 16 * size) {
        if (p->given->width - k < 16) w = memcpy(room, w, (p->given->width - k) * size);
        READ_AHEAD(w, 16 * size)
        ALL(part, 16 / LANES) {
            const vec some = plain_numbers(kind, w + part * LANES * size);
#if LANES == 16
            ALL(r, count) totals[r][0] = (vec)_mm512_fmadd_ps((__m512)some, _mm512_loadu_ps(x[r] + k), (__m512)totals[r][0]);
#else
            ALL(r, count) {
                const __m256 right = _mm256_loadu_ps(x[r] + k + part * 8);
                totals[r][part] = (vec)_mm256_fmadd_ps((__m256)some, right, (__m256)totals[r][part]);
            }
#endif
        }
    }
    ALL(r, count) {
#if LANES == 16
        const __m256 first = _mm512_castps512_ps256((__m512)totals[r][0]), last = _mm512_extractf32x8_ps((__m512)totals[r][0], 1);
#else
        const __m256 first = (__m256)totals[r][0], last = (__m256)totals[r][1];
#endif
        if (r < rows) finish_row(p->given, row + r, output, total_of(_mm256_add_ps(first, last)));
    }
}

/* Define NAME(p, row, count, rows, output, kind) for blocks of codes. DOT(codes, high, low): sums of 4 products of unsigned codes.
   SHIFTS: whether signed codes become unsigned by 128 more, which DOT_PAIRS has no room for; else by their size, with their sign given
   to x. */
#define CODES_PRODUCT(NAME, FEATURES, DOT, SHIFTS)                                                                                  \
    FEATURES INLINE void NAME(const Prepared *p, int64_t row, const int count, int64_t rows, int64_t output, const int kind) {      \
        const int zero = zero_with(kind, SHIFTS), is_unsigned = has_offsets(kind) || zero;                                          \
        const uint8_t *w = p->given->weight[output];                                                                                \
        const int64_t num_groups = p->num_groups, full = p->given->width / GROUP;                                                   \
        const Rounded *x[TOGETHER];                                                                                                 \
        __m256 totals[TOGETHER][2];                                                                                                 \
        float rest[TOGETHER] = {0};                                                                                                 \
        ALL(r, count) x[r] = p->groups + (row + GIVEN(r)) * num_groups;                                                             \
        ALL(r, count) totals[r][0] = totals[r][1] = _mm256_setzero_ps();                                                            \
        for (int64_t group = 0; group < full; group++, w += GROUP / block_values(kind) * block_bytes(kind)) {                       \
            READ_AHEAD(w, GROUP / block_values(kind) * block_bytes(kind));                                                          \
            Scales s;                                                                                                               \
            float by[TOGETHER][16];                                                                                                 \
            scales_of(kind, w, &s);                                                                                                 \
            ALL(r, count) {                                                                                                         \
                const Rounded *of = x[r] + group;                                                                                   \
                const __m256 scales = _mm256_loadu_ps(of->scales), all = _mm256_loadu_ps(s.scales);                                 \
                if (is_fine(kind)) {                                                                                                \
                    const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3), high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7); \
                    const __m256 rest = _mm256_loadu_ps(s.scales + 8);                                                              \
                    _mm256_storeu_ps(by[r], _mm256_mul_ps(all, _mm256_permutevar8x32_ps(scales, low)));                             \
                    _mm256_storeu_ps(by[r] + 8, _mm256_mul_ps(rest, _mm256_permutevar8x32_ps(scales, high)));                       \
                } else                                                                                                              \
                    _mm256_storeu_ps(by[r], _mm256_mul_ps(all, scales));                                                            \
                for (int part = 0; is_unsigned && part < (is_fine(kind) ? 2 : 1); part++) {                                         \
                    const float *sums = (is_fine(kind) ? of->sums_of_16 : of->sums) + part * 8;                                     \
                    const __m256 least = _mm256_mul_ps(_mm256_loadu_ps(s.scales + part * 8), _mm256_set1_ps(-(float)zero));         \
                    const __m256 offsets = has_offsets(kind) ? _mm256_loadu_ps(s.offsets + part * 8) : least;                       \
                    totals[r][part] = _mm256_fmadd_ps(offsets, _mm256_loadu_ps(sums), totals[r][part]);                             \
                }                                                                                                                   \
            }                                                                                                                       \
            __asm__("" : "+m"(by));                                                                                                 \
            _Pragma("GCC unroll 8") for (int run = 0; run < 8; run++) {                                                             \
                const __m256i codes = (__m256i)(stored_codes(kind, w, run) ^ (uint8_t)(zero & 128));                                \
                const __m256i sizes = is_unsigned ? codes : _mm256_abs_epi8(codes);                                                 \
                ALL(r, count) {                                                                                                     \
                    __m256i high = _mm256_loadu_si256((const void *)(x[r][group].high + run * RUN));                                \
                    __m256i low = _mm256_loadu_si256((const void *)(x[r][group].low + run * RUN));                                  \
                    if (!is_unsigned) high = _mm256_sign_epi8(high, codes), low = _mm256_sign_epi8(low, codes);                     \
                    const __m256 dot = _mm256_cvtepi32_ps(DOT(sizes, high, low));                                                   \
                    const __m256 scale = is_fine(kind) ? _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_broadcast_ss(by[r] + 2 * run)), \
                                                                              _mm_broadcast_ss(by[r] + 2 * run + 1), 1)             \
                                                       : _mm256_broadcast_ss(by[r] + run);                                          \
                    totals[r][run % 2] = _mm256_fmadd_ps(dot, scale, totals[r][run % 2]);                                           \
                }                                                                                                                   \
            }                                                                                                                       \
        }                                                                                                                           \
        for (int run = 0; full < num_groups && run < p->given->width % GROUP / RUN; run++, w += block_bytes(kind)) {                \
            float offset = 0;                                                                                                       \
            const float scale = scale_of_block(kind, w, &offset);                                                                   \
            const __m256i codes = (__m256i)(stored_codes(kind, w, 0) ^ (uint8_t)(zero & 128));                                      \
            const __m256i sizes = is_unsigned ? codes : _mm256_abs_epi8(codes);                                                     \
            offset = has_offsets(kind) ? offset : -scale * (float)zero;                                                             \
            ALL(r, count) {                                                                                                         \
                const Rounded *of = x[r] + full;                                                                                    \
                __m256i high = _mm256_loadu_si256((const void *)(of->high + run * RUN));                                            \
                __m256i low = _mm256_loadu_si256((const void *)(of->low + run * RUN));                                              \
                if (!is_unsigned) high = _mm256_sign_epi8(high, codes), low = _mm256_sign_epi8(low, codes);                         \
                const __m256 dot = _mm256_cvtepi32_ps(DOT(sizes, high, low));                                                       \
                totals[r][0] = _mm256_fmadd_ps(dot, _mm256_set1_ps(scale * of->scales[run]), totals[r][0]);                         \
                if (is_unsigned) rest[r] = fmaf(offset, of->sums[run], rest[r]);                                                    \
            }                                                                                                                       \
        }                                                                                                                           \
        ALL(r, count)                                                                                                               \
            if (r < rows) finish_row(p->given, row + r, output, total_of(_mm256_add_ps(totals[r][0], totals[r][1])) + rest[r]);     \
    }

/* Define NAME_COUNT(p, row, rows, output) by NAME_CODES(kind), or NUMBERS(kind), with the kind and the count as constants. */
#define BY_KIND(NAME, FEATURES, COUNT)                                                                                              \
    FEATURES static void NAME##_##COUNT(const Prepared *p, int64_t row, int64_t rows, int64_t output) {                             \
        const int count = COUNT;                                                                                                    \
        switch (p->given->kinds[output]) { EACH_KIND(NAME##_CODES) EACH_FLOAT_KIND(NUMBERS) }                                       \
    }
#define NUMBERS(KIND) product_of_numbers(p, row, count, rows, output, KIND)

/* Define NAME(p, first, last), which computes these outputs. */
#define DECODE_PRODUCT(NAME, FEATURES, DOT, SHIFTS)                                                                                 \
    CODES_PRODUCT(NAME##_codes, FEATURES, DOT, SHIFTS)                                                                              \
    BY_KIND(NAME, FEATURES, 1)                                                                                                      \
    BY_KIND(NAME, FEATURES, 4)                                                                                                      \
    static void NAME##_some(const Prepared *p, int64_t row, int64_t rows, int64_t output) {                                         \
        if (rows > 2)                                                                                                               \
            NAME##_4(p, row, rows, output);                                                                                         \
        else                                                                                                                        \
            for (; rows > 0; rows--, row++) NAME##_1(p, row, 1, output);                                                            \
    }                                                                                                                               \
    static void NAME(const Prepared *p, int64_t first, int64_t last) { EACH_OUTPUT(NAME##_some, TOGETHER) }

#define pairs_CODES(KIND) pairs_codes(p, row, count, rows, output, KIND)
#define DOT_PAIRS(codes, high, low)                                                                                                 \
    _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(codes, high), _mm256_set1_epi16(128)),                                  \
                     _mm256_madd_epi16(_mm256_maddubs_epi16(codes, low), _mm256_set1_epi16(1)))
DECODE_PRODUCT(pairs, FAST, DOT_PAIRS, 0)
#ifdef AVX512
#define VNNI AVX512(",avx2,fma,f16c,avx512vnni")
#define DOT_VNNI(codes, high, low)                                                                                                  \
    _mm256_dpbusd_epi32(_mm256_slli_epi32(_mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, high), 7), codes, low)
CODES_PRODUCT(vnni_codes, VNNI, DOT_VNNI, 1)

/* The same sums to the bit, for `count` pairs of rows. Products of codes and values are of 16 bits: two less operations for a pair than
   with bytes. */
VNNI INLINE void vnni_pairs(const Prepared *p, int64_t row, const int count, int64_t rows, int64_t output, const int kind) {
    const int zero = zero_with(kind, 1), size = GROUP / block_values(kind) * block_bytes(kind);
    const uint8_t *w = p->given->weight[output];
    const int64_t full = p->given->width / GROUP;
    const __m512i words = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i lanes = _mm512_setr_epi32(LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7), LANE(8), LANE(9),
                                            LANE(10), LANE(11), LANE(12), LANE(13), LANE(14), LANE(15));
#define BOTH_ROWS(lanes, x) _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(x))
/* Add a run's products to totals of each pair, where SCALE may name the pair's number, r, and its values, of. */
#define ADD_RUN(k, group, run, total, SCALE)                                                                                        \
    do {                                                                                                                            \
        const __m256i few = (__m256i)(stored_codes(kind, w, k) ^ (uint8_t)(zero & 128));                                            \
        const __m512i codes = _mm512_permutexvar_epi32(lanes, _mm512_castsi256_si512(few));                                         \
        const __m512i even = _mm512_and_si512(codes, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(codes, 8);                    \
        ALL(r, count) {                                                                                                             \
            const TwoRows *of = x[r] + group;                                                                                       \
            const __m512i sums = _mm512_madd_epi16(even, _mm512_loadu_si512(of->even[run]));                                        \
            const __m512 dot = _mm512_cvtepi32_ps(_mm512_dpwssd_epi32(sums, odd, _mm512_loadu_si512(of->odd[run])));                \
            total = _mm512_fmadd_ps(dot, SCALE, total);                                                                             \
        }                                                                                                                           \
    } while (0)
    const TwoRows *x[4];
    __m512 totals[4][2], rest[4];
    ALL(r, count) {
        x[r] = p->pairs + (row / 2 + r) * p->num_groups;
        totals[r][0] = totals[r][1] = rest[r] = _mm512_setzero_ps();
    }
    for (int64_t group = 0; group < full; group++, w += size) {
        READ_AHEAD(w, size);
        Scales s;
        float by[4][32];
        scales_of(kind, w, &s);
        _Pragma("GCC unroll 2") for (int part = 0; part < 2; part++) {
            const __m512i at = is_fine(kind) ? _mm512_srli_epi32(words, 1)
                                             : _mm512_add_epi32(_mm512_srli_epi32(words, 2), _mm512_set1_epi32(4 * part));
            const __m256 scales = _mm256_loadu_ps(s.scales + (is_fine(kind) ? 8 * part : 0));
            ALL(r, count)
                _mm512_storeu_ps(by[r] + 16 * part,
                                 _mm512_mul_ps(BOTH_ROWS(at, scales), _mm512_loadu_ps(x[r][group].scales + 16 * part)));
            if (part && !is_fine(kind)) continue;
            const __m256 least = _mm256_mul_ps(scales, _mm256_set1_ps(-(float)zero));
            const __m512 offsets = BOTH_ROWS(lanes, has_offsets(kind) ? _mm256_loadu_ps(s.offsets + 8 * part) : least);
            ALL(r, count) {
                const float *sums = is_fine(kind) ? x[r][group].sums_of_16 + 16 * part : x[r][group].sums;
                totals[r][part] = _mm512_fmadd_ps(offsets, _mm512_loadu_ps(sums), totals[r][part]);
            }
        }
        __asm__("" : "+m"(by));
        _Pragma("GCC unroll 8") for (int run = 0; run < 8; run++)
            ADD_RUN(run, group, run, totals[r][run % 2], _mm512_broadcast_f32x4(_mm_loadu_ps(by[r] + 4 * run)));
    }
    for (int run = 0; run < p->given->width % GROUP / RUN && block_values(kind) == RUN; run++, w += block_bytes(kind)) {
        float offset = 0;
        const float scale = scale_of_block(kind, w, &offset);
        ADD_RUN(0, full, run, totals[r][0],
                _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_broadcast_f32x4(_mm_loadu_ps(of->scales + 4 * run))));
        offset = has_offsets(kind) ? offset : -scale * (float)zero;
        ALL(r, count) { /* the sums of a run are beside each other too */
            const float *sums = x[r][full].sums + run % 4 * 4 + run / 4 * 2;
            const __m512 both = _mm512_broadcast_f32x2(_mm_castsi128_ps(_mm_loadl_epi64((const void *)sums)));
            rest[r] = _mm512_fmadd_ps(_mm512_set1_ps(offset), both, rest[r]);
        }
    }
    const __m512i of_first = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    ALL(r, 2 * count) {
        const __m512i of_row = _mm512_add_epi32(of_first, _mm512_set1_epi32(r % 2));
        const __m512 total = _mm512_permutexvar_ps(of_row, _mm512_add_ps(totals[r / 2][0], totals[r / 2][1]));
        if (r < rows) finish_row(p->given, row + r, output, total_of(_mm512_castps512_ps256(total)) + rest[r / 2][r % 2]);
    }
}
#undef BOTH_ROWS
#undef ADD_RUN

#define vnni_CODES(KIND)                                                                                                            \
    if (count == 1)                                                                                                                 \
        vnni_codes(p, row, 1, 1, output, KIND);                                                                                     \
    else                                                                                                                            \
        vnni_pairs(p, row, count / 2, rows, output, KIND)
BY_KIND(vnni, VNNI, 1)
BY_KIND(vnni, VNNI, 2)
BY_KIND(vnni, VNNI, 4)
BY_KIND(vnni, VNNI, 6)
BY_KIND(vnni, VNNI, 8)
static void vnni_some(const Prepared *p, int64_t row, int64_t rows, int64_t output) {
    (rows == 1 ? vnni_1 : rows == 2 ? vnni_2 : rows <= 4 ? vnni_4 : rows <= 6 ? vnni_6 : vnni_8)(p, row, rows, output);
}
static void vnni(const Prepared *p, int64_t first, int64_t last) { EACH_OUTPUT(vnni_some, MOST_TOGETHER) }
#elif __GNUC__ >= 11
#define DOT_VNNI(codes, high, low)                                                                                                  \
    _mm256_dpbusd_avx_epi32(_mm256_slli_epi32(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), codes, high), 7), codes, low)
#define vnni_CODES(KIND) vnni_codes(p, row, count, rows, output, KIND)
DECODE_PRODUCT(vnni, __attribute__((target("avx2,fma,f16c,avxvnni"))), DOT_VNNI, 1)
#endif
#else
/* Copy what is left of a row into blocks of zeros. */
INLINE const uint8_t *padded(const int kind, const uint8_t *p, int64_t values, uint8_t *room) {
    memset(room, 0, 8 * 34);
    memcpy(room, p, values / block_values(kind) * block_bytes(kind));
    return room;
}

/* One output, in plain C. */
static void product_of_output(const Prepared *p, int64_t row, int64_t rows, int64_t output) {
    const DecodeProduct *given = p->given;
    const int kind = given->kinds[output];
    float totals[TOGETHER] = {0};
    if (block_values(kind) == 1) {
        float w[GROUP];
        for (int64_t k = 0; k < given->width; k += GROUP) {
            const int64_t count = given->width - k < GROUP ? given->width - k : GROUP;
            restore_row(kind, given->weight[output], k, count, w);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < count; i++) totals[r] += w[i] * p->numbers[(row + r) * p->num_numbers + k + i];
        }
    } else {
        uint8_t room[8 * 34];
        const uint8_t *w = given->weight[output];
        for (int64_t group = 0; group < p->num_groups; group++, w += GROUP / block_values(kind) * block_bytes(kind)) {
            uint8_t codes[GROUP];
            Scales s;
            if (block_values(kind) == RUN && given->width - group * GROUP < GROUP)
                w = padded(kind, w, given->width - group * GROUP, room);
            scales_of(kind, w, &s);
            for (int run = 0; run < 8; run++) {
                const bytes32 some = codes_of(kind, w, run);
                memcpy(codes + run * RUN, &some, RUN);
            }
            for (int64_t r = 0; r < rows; r++) {
                const Rounded *x = p->groups + (row + r) * p->num_groups + group;
                for (int part = 0; part < 16; part++) {
                    const int scale = is_fine(kind) ? part : part / 2;
                    int32_t dot = 0;
                    for (int i = part * 16; i < part * 16 + 16; i++)
                        dot += (has_offsets(kind) ? codes[i] : (int8_t)codes[i]) * (128 * x->high[i] + x->low[i]);
                    totals[r] += s.scales[scale] * x->scales[part / 2] * (float)dot;
                    if (has_offsets(kind)) totals[r] += s.offsets[scale] * x->sums_of_16[part];
                }
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) finish_row(given, row + r, output, totals[r]);
}

static void product_of_outputs(const Prepared *p, int64_t first, int64_t last) { EACH_OUTPUT(product_of_output, TOGETHER) }
#endif

/* Return 1 if memory is short, the CPU lacks the instructions, or a kind is unknown or does not have rows of this width. */
int cb_decode_product(const DecodeProduct *given) {
    void (*multiply)(const Prepared *, int64_t, int64_t) = 0;
    Prepared own = {given, 0, 0, 0, (given->width + GROUP - 1) / GROUP, (given->width + 15) / 16 * 16}, *p = &own;
    int codes = 0, numbers = 0, in_pairs = 0, last_kind = -1;
    const int64_t num_pairs = (given->rows + 1) / 2;
    for (int64_t i = 0; i < given->outputs; i++) {
        const int kind = given->kinds[i];
        if (kind == last_kind) continue;
        const int values = block_values(last_kind = kind);
        if (!values || given->width % values) return 1;
        *(values == 1 ? &numbers : &codes) = 1;
    }
    if (!has_fast()) return 1;
#ifdef PRODUCTS
    multiply = pairs;
#ifdef AVX512
    if (given->vnni && __builtin_cpu_supports("avx512vnni")) multiply = vnni, in_pairs = codes && given->rows > 1;
#elif __GNUC__ >= 11
    if (given->vnni && __builtin_cpu_supports("avxvnni")) multiply = vnni;
#endif
#else
    multiply = product_of_outputs;
#endif
    if (codes) p->groups = aligned_alloc(64, given->rows * p->num_groups * sizeof(Rounded)); /* a multiple of 64 bytes each */
    if (numbers) p->numbers = aligned_alloc(64, given->rows * p->num_numbers * sizeof(float));
    if (in_pairs) p->pairs = aligned_alloc(64, num_pairs * p->num_groups * sizeof(TwoRows));
    const int failed = (codes && !p->groups) || (numbers && !p->numbers) || (in_pairs && !p->pairs);
    if (!failed) {
        IN_PARTS(num_pairs, given->rows > TOGETHER ? given->threads : 1, prepare_pairs(p, first, last));
        IN_PARTS(given->outputs, given->threads, multiply(p, first, last));
    }
    free(p->groups);
    free(p->numbers);
    free(p->pairs);
    return failed;
}
