"""Documents to stored chunks."""
