/* Products of a few rows with weights in the blocks of a GGUF file, each read once for 4 rows. With blocks of codes, rows are rounded to
   whole numbers of 15 bits, with a scale for 32 values; with F32, F16 and BF16 they are not. A row's result depends neither on other
   rows nor on threads. */

enum { TOGETHER = 4, AT_A_TIME = 8 }; /* rows for which a block is unpacked once; outputs that stay cached from rows to rows */

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

typedef struct {
    const DecodeProduct *given;
    Rounded *groups; /* [rows, num_groups], or null without blocks of codes */
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
                float x[RUN] = {0}, most = 0;
                int sums[2] = {0}, nan = 0;
                if (at < given->width)
                    for (int i = 0; i < RUN; i += LANES) {
                        const vec some = load(given->x, row * given->width + at + i, given->type);
                        memcpy(x + i, &some, sizeof some);
                    }
                for (int i = 0; i < RUN; i++) {
                    const float size = fabsf(x[i]);
                    most = size > most ? size : most;
                    nan |= x[i] != x[i];
                }
                most = most < 1e-30f ? 1e-30f : most;
                const float by = MOST / most;
                for (int i = 0; i < RUN; i++) {
                    const float code = x[i] * by + 12582912.f; /* the nearest whole number in the last bits */
                    int32_t bits;
                    memcpy(&bits, &code, 4);
                    bits -= 0x4b400000;
                    const int32_t high = (bits + 64) >> 7;
                    to->high[run * RUN + i] = (int8_t)high;
                    to->low[run * RUN + i] = (int8_t)(bits - 128 * high);
                    sums[i / 16] += bits;
                }
                to->scales[run] = nan ? NAN : most / MOST;
                to->sums[run] = to->scales[run] * (float)(sums[0] + sums[1]);
                to->sums_of_16[run * 2] = to->scales[run] * (float)sums[0];
                to->sums_of_16[run * 2 + 1] = to->scales[run] * (float)sums[1];
            }
        }
    }
}

INLINE void finish_row(const DecodeProduct *given, int64_t row, int64_t output, float sum) {
    const float bias = given->bias ? value_at(given->bias, output, given->bias_type) : 0;
    put(given->out, row * given->outputs + output, fmaf(sum, given->factor, bias), given->type);
}

#define EACH_OUTPUT(NAME)                                                                                                           \
    for (int64_t at = first; at < last; at += AT_A_TIME)                                                                            \
        for (int64_t row = 0; row < p->given->rows; row += TOGETHER)                                                                \
            for (int64_t output = at; output < last && output < at + AT_A_TIME; output++)                                           \
                NAME(p, row, p->given->rows - row < TOGETHER ? p->given->rows - row : TOGETHER, output);

/* Fetch what is read in a while: a core's own prefetching leaves half of the memory's bandwidth unused. */
enum { WEIGHTS_AHEAD = 4096 };
#define READ_AHEAD(p, size)                                                                                                         \
    for (int line_ = 0; line_ < (size); line_ += 64) __builtin_prefetch((p) + WEIGHTS_AHEAD + line_);

#ifdef PRODUCTS
/* What is subtracted from unsigned codes, those included that are read as 128 more than signed ones. */
INLINE int zero_with(const int kind, const int shifts) { return shifts && !has_offsets(kind) && !zero_of(kind) ? 128 : zero_of(kind); }

#define ALL(r) _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)

FAST INLINE float total_of(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

FAST INLINE __m256 numbers8(const int kind, const uint8_t *p) {
    if (kind == F32) return _mm256_loadu_ps((const float *)p);
    const __m128i h = _mm_loadu_si128((const void *)p);
    return kind == F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

FAST INLINE void product_of_numbers(const Prepared *p, int64_t row, const int rows, int64_t output, const int kind) {
    const int size = block_bytes(kind);
    const uint8_t *w = p->given->weight[output];
    const float *x = p->numbers + row * p->num_numbers;
    __m256 totals[TOGETHER][2];
    ALL(r) totals[r][0] = totals[r][1] = _mm256_setzero_ps();
    uint8_t room[64] = {0};
    for (int64_t k = 0; k < p->num_numbers; k += 16, w += 16 * size) {
        if (p->given->width - k < 16) w = memcpy(room, w, (p->given->width - k) * size);
        READ_AHEAD(w, 16 * size)
        const __m256 a = numbers8(kind, w), b = numbers8(kind, w + 8 * size);
        ALL(r) {
            totals[r][0] = _mm256_fmadd_ps(a, _mm256_loadu_ps(x + r * p->num_numbers + k), totals[r][0]);
            totals[r][1] = _mm256_fmadd_ps(b, _mm256_loadu_ps(x + r * p->num_numbers + k + 8), totals[r][1]);
        }
    }
    ALL(r) finish_row(p->given, row + r, output, total_of(_mm256_add_ps(totals[r][0], totals[r][1])));
}

/* Define NAME(p, first, last), which computes these outputs. DOT(codes, high, low): sums of 4 products of unsigned codes. SHIFTS:
   whether signed codes become unsigned by 128 more, which DOT_PAIRS has no room for; else by their size, with their sign given to x. */
#define DECODE_PRODUCT(NAME, FEATURES, DOT, SHIFTS)                                                                                 \
    FEATURES INLINE void NAME##_codes(const Prepared *p, int64_t row, const int rows, int64_t output, const int kind) {             \
        const int zero = zero_with(kind, SHIFTS), is_unsigned = has_offsets(kind) || zero;                                          \
        const uint8_t *w = p->given->weight[output];                                                                                \
        const int64_t num_groups = p->num_groups, full = p->given->width / GROUP;                                                   \
        const Rounded *x = p->groups + row * num_groups;                                                                            \
        __m256 totals[TOGETHER][2];                                                                                                 \
        float rest[TOGETHER] = {0};                                                                                                 \
        ALL(r) totals[r][0] = totals[r][1] = _mm256_setzero_ps();                                                                   \
        for (int64_t group = 0; group < full; group++, w += GROUP / block_values(kind) * block_bytes(kind), x++) {                  \
            READ_AHEAD(w, GROUP / block_values(kind) * block_bytes(kind));                                                          \
            Scales s;                                                                                                               \
            float by[TOGETHER][16];                                                                                                 \
            scales_of(kind, w, &s);                                                                                                 \
            ALL(r) {                                                                                                                \
                const Rounded *of = x + r * num_groups;                                                                             \
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
                ALL(r) {                                                                                                            \
                    __m256i high = _mm256_loadu_si256((const void *)(x[r * num_groups].high + run * RUN));                          \
                    __m256i low = _mm256_loadu_si256((const void *)(x[r * num_groups].low + run * RUN));                            \
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
            ALL(r) {                                                                                                                \
                const Rounded *of = x + r * num_groups;                                                                             \
                __m256i high = _mm256_loadu_si256((const void *)(of->high + run * RUN));                                            \
                __m256i low = _mm256_loadu_si256((const void *)(of->low + run * RUN));                                              \
                if (!is_unsigned) high = _mm256_sign_epi8(high, codes), low = _mm256_sign_epi8(low, codes);                         \
                const __m256 dot = _mm256_cvtepi32_ps(DOT(sizes, high, low));                                                       \
                totals[r][0] = _mm256_fmadd_ps(dot, _mm256_set1_ps(scale * of->scales[run]), totals[r][0]);                         \
                if (is_unsigned) rest[r] = fmaf(offset, of->sums[run], rest[r]);                                                    \
            }                                                                                                                       \
        }                                                                                                                           \
        ALL(r) finish_row(p->given, row + r, output, total_of(_mm256_add_ps(totals[r][0], totals[r][1])) + rest[r]);                \
    }                                                                                                                               \
    FEATURES static void NAME##_one(const Prepared *p, int64_t row, int64_t output) {                                               \
        switch (p->given->kinds[output]) { EACH_KIND(NAME##_CODES_1) EACH_FLOAT_KIND(NUMBERS_1) }                                   \
    }                                                                                                                               \
    FEATURES static void NAME##_all(const Prepared *p, int64_t row, int64_t output) {                                               \
        switch (p->given->kinds[output]) { EACH_KIND(NAME##_CODES_4) EACH_FLOAT_KIND(NUMBERS_4) }                                   \
    }                                                                                                                               \
    FEATURES static void NAME##_some(const Prepared *p, int64_t row, int64_t rows, int64_t output) {                                \
        if (rows == TOGETHER)                                                                                                       \
            NAME##_all(p, row, output);                                                                                             \
        else                                                                                                                        \
            for (; rows > 0; rows--, row++) NAME##_one(p, row, output);                                                             \
    }                                                                                                                               \
    FEATURES static void NAME(const Prepared *p, int64_t first, int64_t last) { EACH_OUTPUT(NAME##_some) }

#define NUMBERS_1(KIND) product_of_numbers(p, row, 1, output, KIND)
#define NUMBERS_4(KIND) product_of_numbers(p, row, 4, output, KIND)
#define pairs_CODES_1(KIND) pairs_codes(p, row, 1, output, KIND)
#define pairs_CODES_4(KIND) pairs_codes(p, row, 4, output, KIND)
#define vnni_CODES_1(KIND) vnni_codes(p, row, 1, output, KIND)
#define vnni_CODES_4(KIND) vnni_codes(p, row, 4, output, KIND)
#define DOT_PAIRS(codes, high, low)                                                                                                 \
    _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(codes, high), _mm256_set1_epi16(128)),                                  \
                     _mm256_madd_epi16(_mm256_maddubs_epi16(codes, low), _mm256_set1_epi16(1)))
DECODE_PRODUCT(pairs, FAST, DOT_PAIRS, 0)
#ifdef AVX512
#define DOT_VNNI(codes, high, low)                                                                                                  \
    _mm256_dpbusd_epi32(_mm256_slli_epi32(_mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, high), 7), codes, low)
DECODE_PRODUCT(vnni, AVX512(",avx2,fma,f16c,avx512vnni"), DOT_VNNI, 1)
#elif __GNUC__ >= 11
#define DOT_VNNI(codes, high, low)                                                                                                  \
    _mm256_dpbusd_avx_epi32(_mm256_slli_epi32(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), codes, high), 7), codes, low)
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

static void product_of_outputs(const Prepared *p, int64_t first, int64_t last) { EACH_OUTPUT(product_of_output) }
#endif

/* Return 1 if memory is short, the CPU lacks the instructions, or a kind is unknown or does not have rows of this width. */
int cb_decode_product(const DecodeProduct *given) {
    void (*multiply)(const Prepared *, int64_t, int64_t) = 0;
    Prepared own = {given, 0, 0, (given->width + GROUP - 1) / GROUP, (given->width + 15) / 16 * 16}, *p = &own;
    int codes = 0, numbers = 0, last_kind = -1;
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
    if (given->vnni && __builtin_cpu_supports("avx512vnni")) multiply = vnni;
#elif __GNUC__ >= 11
    if (given->vnni && __builtin_cpu_supports("avxvnni")) multiply = vnni;
#endif
#else
    multiply = product_of_outputs;
#endif
    if (codes) p->groups = aligned_alloc(64, given->rows * p->num_groups * sizeof(Rounded)); /* a multiple of 64 bytes each */
    if (numbers) p->numbers = aligned_alloc(64, given->rows * p->num_numbers * sizeof(float));
    const int failed = (codes && !p->groups) || (numbers && !p->numbers);
    if (!failed) {
        IN_PARTS(given->rows, given->rows > TOGETHER ? given->threads : 1, prepare_rows(p, first, last));
        IN_PARTS(given->outputs, given->threads, multiply(p, first, last));
    }
    free(p->groups);
    free(p->numbers);
    return failed;
}
