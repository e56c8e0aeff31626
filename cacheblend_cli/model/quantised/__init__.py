"""Quantised weights, dequantised as they are read. Each file implements `stored.Rows` for one format."""
