/* silu(gate) * up of an MLP, and rounding of activations to 8 bits. */

/* Rows are [gate, up]; silu(gate) and the product are rounded. */

INLINE void gate_row(const void *x, void *out, int64_t dim, int type) {
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec gate = load(x, i, type), e = exponential((vec)((vecu)gate | 0x80000000u)); /* e^-|gate| */
        const vec silu = gate * where(gate < 0, e, splat(1.f)) / (1.f + e);
        store(out, i, as_type(silu, type) * load(x, dim + i, type), type);
    }
}

CLONES static void gate_rows(const char *x, char *out, int64_t first, int64_t last, int64_t dim, int type) {
    for (int64_t row = first; row < last; row++)
        if (type == FLOAT32)
            gate_row(x + row * dim * 8, out + row * dim * 4, dim, FLOAT32);
        else
            gate_row(x + row * dim * 4, out + row * dim * 2, dim, BFLOAT16);
}

typedef struct {
    const void *x;
    void *out;
    int64_t rows, dim; /* dim: width of out, half of x's */
    int32_t type, threads;
} Gate;

void cb_silu_and_mul(const Gate *g) {
    IN_PARTS(g->rows, g->threads, gate_rows(g->x, g->out, first, last, g->dim, g->type));
}

/* Round a row to 8 bits: x = (out - 128) * scale. scale_type: type of the product's result. */

INLINE void round_row(const void *x, uint8_t *out, void *scale, int64_t row, int64_t dim, int type, int scale_type) {
    vec most = {0};
    veci nan = {0}; /* the maximum skips NaN */
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec v = load(x, i, type);
        most = larger((vec)((vecu)v & 0x7fffffffu), most);
        nan |= v != v;
    }
    const float value = largest(where(nan, splat(NAN), most));
    const vec by = as_type(splat((value < 1e-12f ? 1e-12f : value) / 127.f), scale_type);
    if (scale_type == FLOAT32)
        ((float *)scale)[row] = by[0];
    else
        ((uint16_t *)scale)[row] = (uint16_t)(((vecu)by)[0] >> 16);
    for (int64_t i = 0; i < dim; i += LANES) {
        bytes whole = __builtin_convertvector(__builtin_convertvector(load(x, i, type) / by + 128.5f, veci), bytes);
        memcpy(out + i, &whole, sizeof whole);
    }
}

CLONES static void round_rows(const char *x, uint8_t *out, void *scale, int64_t first, int64_t last, int64_t dim,
                              int type, int scale_type) {
    for (int64_t row = first; row < last; row++) {
        if (type == FLOAT32)
            round_row(x + row * dim * 4, out + row * dim, scale, row, dim, FLOAT32, scale_type);
        else
            round_row(x + row * dim * 2, out + row * dim, scale, row, dim, BFLOAT16, scale_type);
    }
}

typedef struct {
    const void *x;
    uint8_t *out;
    void *scale;
    int64_t rows, dim;
    int32_t type, scale_type, threads;
} Rounding;

void cb_round_rows(const Rounding *r) {
    IN_PARTS(r->rows, r->threads, round_rows(r->x, r->out, r->scale, first, last, r->dim, r->type, r->scale_type));
}
