"""Word documents and RTF."""
