"""The generic path: a decoder of transformers without a file in `families` runs on transformers' own layers.

A layer is called twice: for q, k and v of some rows, and for its output given attention's result (`seam`). Between the
calls run our RoPE, pool and kernels. This is slower than a family's layers, which project once and do not use
transformers.
"""

GENERIC_PATH = "generic path: transformers' own layers, exact and slower"
