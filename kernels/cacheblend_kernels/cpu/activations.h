/* silu(gate) * up of an MLP. */

/* silu(gate) is rounded, like the product. */
INLINE vec gated(vec gate, vec up, int type) {
    const vec e = exponential((vec)((vecu)gate | 0x80000000u)); /* e^-|gate| */
    return as_type(gate * where(gate < 0, e, splat(1.f)) / (1.f + e), type) * up;
}

/* Rows are [gate, up]. */
INLINE void gate_row(const void *x, void *out, int64_t dim, int type) {
    for (int64_t i = 0; i < dim; i += LANES) store(out, i, gated(load(x, i, type), load(x, dim + i, type), type), type);
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
