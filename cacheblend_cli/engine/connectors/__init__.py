"""Connectors: other engines that decode from a prompt that was prefilled here."""
