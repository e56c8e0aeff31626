"""Chunks as plain files, out and in."""
