"""Triton kernels for NVIDIA GPUs, one family per file, and the backend that combines them."""
