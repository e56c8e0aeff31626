"""Settings: what they are (`fields`), where they come from (`sources`), and what they identify (`identity`)."""

from cacheblend_cli.settings.fields import GROUPS, Settings, grouped, of_settings
from cacheblend_cli.settings.sources import DEFAULTS, Resolved, resolve

__all__ = ["DEFAULTS", "GROUPS", "Resolved", "Settings", "grouped", "of_settings", "resolve"]
