"""Byte formats of keys, records and blobs."""
