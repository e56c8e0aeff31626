"""Blended prefill over precomputed chunk KV caches (CacheBlend, EuroSys'25, arXiv 2405.16444)."""

__version__ = "0.1.0"
