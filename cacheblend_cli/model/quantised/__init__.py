"""Quantised weights, dequantised as they are read. Each file implements `stored.RowwiseWeight` for one format."""
