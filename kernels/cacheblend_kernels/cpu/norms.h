/* RMSNorm: residual += x if there is a residual; out = norm(residual or x) * weight. */

INLINE void norm_row(const void *x, void *residual, const void *weight, void *out, int64_t dim, float eps, int type,
                     int weight_type) {
    vec square[2] = {{0}, {0}};
    for (int64_t i = 0; i < dim; i += LANES) {
        vec v = load(x, i, type);
        if (residual) {
            v = as_type(v + load(residual, i, type), type);
            store(residual, i, v, type);
        }
        square[i / LANES & 1] += v * v;
    }
    const vec factor = splat(1.f / sqrtf(sum(square[0] + square[1]) / (float)dim + eps));
    const void *source = residual ? residual : x;
    for (int64_t i = 0; i < dim; i += LANES) {
        vec v = load(source, i, type) * factor;
        if (type == weight_type) v = as_type(v, type);
        store(out, i, v * load(weight, i, weight_type), type);
    }
}

CLONES static void norm_rows(const char *x, char *residual, const void *weight, char *out, int64_t first, int64_t last,
                             int64_t dim, float eps, int type, int weight_type) {
    const int64_t size = dim * (type == FLOAT32 ? 4 : 2);
    for (int64_t row = first; row < last; row++) {
        const char *source = x + row * size;
        char *sum_to = residual ? residual + row * size : 0, *to = out + row * size;
        if (type == FLOAT32)
            norm_row(source, sum_to, weight, to, dim, eps, FLOAT32, FLOAT32);
        else if (weight_type == FLOAT32)
            norm_row(source, sum_to, weight, to, dim, eps, BFLOAT16, FLOAT32);
        else
            norm_row(source, sum_to, weight, to, dim, eps, BFLOAT16, BFLOAT16);
    }
}

typedef struct {
    const void *x;
    void *residual; /* may be null */
    const void *weight;
    void *out;
    int64_t rows, dim;
    float eps;
    int32_t type, weight_type, threads;
} Norm;

void cb_rms_norm(const Norm *n) {
    IN_PARTS(n->rows, n->threads, norm_rows(n->x, n->residual, n->weight, n->out, first, last, n->dim, n->eps, n->type, n->weight_type));
}
