"""Verify, prune, compact, statistics."""
