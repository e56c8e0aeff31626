"""HTTP, the page and the warm socket: an engine that other programs ask."""
