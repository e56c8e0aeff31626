"""The blending algorithm (CacheBlend, arXiv 2405.16444): choosing tokens to recompute, and the blended prefill."""
