/* RoPE of q and K, and the write of K and V to the pool. */

typedef struct {
    const void *q, *k, *v;   /* rows of contiguous heads, with strides in values; q may be null */
    const float *cos, *sin;  /* [rows, dim], both halves equal */
    const int64_t *slots;    /* [rows] */
    void *q_out, *k_pool, *v_pool; /* [rows, heads, dim], [num_slots, kv_heads, dim] */
    int64_t rows, heads, kv_heads, dim, q_stride, k_stride, v_stride, num_slots;
    int32_t type, threads;
} Rope;

/* The first product is rounded and the second is fused, as in torch's addcmul. */
INLINE void rotate(const void *restrict from, int64_t at, void *restrict to, int64_t out, const float *restrict cos,
                   const float *restrict sin, int64_t heads, int64_t dim, int type) {
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < heads; h++, at += dim, out += dim)
        for (int64_t i = 0; i < half; i++) {
            const float a = value_at(from, at + i, type), b = value_at(from, at + half + i, type);
            put(to, out + i, __builtin_fmaf(-b, sin[i], a * cos[i]), type);
            put(to, out + half + i, __builtin_fmaf(a, sin[i], b * cos[i]), type);
        }
}

INLINE void rotate_rows(const Rope *r, int64_t first, int64_t last, int type) {
    const int64_t size = r->kv_heads * r->dim, width = type == FLOAT32 ? 4 : 2;
    for (int64_t row = first; row < last; row++) {
        const float *cos = r->cos + row * r->dim, *sin = r->sin + row * r->dim;
        if (r->q) rotate(r->q, row * r->q_stride, r->q_out, row * r->heads * r->dim, cos, sin, r->heads, r->dim, type);
        rotate(r->k, row * r->k_stride, r->k_pool, r->slots[row] * size, cos, sin, r->kv_heads, r->dim, type);
        memcpy((char *)r->v_pool + r->slots[row] * size * width, (const char *)r->v + row * r->v_stride * width, size * width);
    }
}

CLONES static void rotate_part(const Rope *r, int64_t first, int64_t last) {
    if (r->type == FLOAT32)
        rotate_rows(r, first, last, FLOAT32);
    else
        rotate_rows(r, first, last, BFLOAT16);
}

/* Return 1, before anything is written, if a slot is outside the pool. */
int cb_rope_and_cache(const Rope *r) {
    for (int64_t row = 0; row < r->rows; row++)
        if (r->slots[row] < 0 || r->slots[row] >= r->num_slots) return 1;
    IN_PARTS(r->rows, r->threads, rotate_part(r, first, last));
    return 0;
}
