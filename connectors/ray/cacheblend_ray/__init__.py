"""Collector of cacheblend that computes on a Ray cluster."""
