"""HTTP, the page and the warm socket: serve an engine to other programs."""
