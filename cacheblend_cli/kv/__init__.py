"""The paged KV cache: pool, blocks, rows, the forward pass over it, and the sources stored KV comes from."""
