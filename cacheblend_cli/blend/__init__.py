"""The blending algorithm (CacheBlend, arXiv 2405.16444): what to recompute, and the prefill that does."""
