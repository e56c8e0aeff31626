"""Maintenance: verify, prune, compact, salvage, statistics, moving chunks to and from a tier."""
