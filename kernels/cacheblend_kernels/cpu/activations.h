/* silu(gate) * up of an MLP. */

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
