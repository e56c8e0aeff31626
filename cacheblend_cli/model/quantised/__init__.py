"""Quantised weights, dequantised as they are read: a file a format, each of which makes `stored.Rows` of a module's tensors."""
