"""Turn documents into stored chunks."""
