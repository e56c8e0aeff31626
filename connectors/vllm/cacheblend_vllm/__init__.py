"""Decoding on a vLLM server for `cacheblend serve`: the connector that vLLM loads, and the decoder of cacheblend."""
