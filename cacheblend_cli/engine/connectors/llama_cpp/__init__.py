"""llama.cpp as a decoder: it takes a prompt's KV as its own state, and decodes the answer."""
