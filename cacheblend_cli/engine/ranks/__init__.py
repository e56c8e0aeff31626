"""Tensor parallelism: rank 0 and the processes beside it."""
