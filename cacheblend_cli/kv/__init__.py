"""The paged KV cache: pool, blocks, rows, the forward pass over it, and sources of stored KV."""
