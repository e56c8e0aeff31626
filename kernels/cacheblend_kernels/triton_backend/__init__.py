"""Triton kernels for NVIDIA GPUs, one family a file, and the backend that ties them together."""
