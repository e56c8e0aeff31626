"""Check of the claims of an answer that can be looked up: figures, names and quotations."""
