"""The generic path: a decoder of transformers that has no file in `families` runs on transformers' own layers.

A layer is asked twice: for q, k and v of some rows, and for what it makes of what attention gave them (`seam`). Between
the two stand our RoPE, pool and kernels. Slower than a family's layers, which project once and know no transformers.
"""

GENERIC_PATH = "generic path: transformers' own layers, exact and slower"
