"""Settings: their fields, the sources of their values, and those that identify an engine or need trust."""

from cacheblend_cli.settings.fields import GROUPS, Settings, grouped, of_settings
from cacheblend_cli.settings.sources import DEFAULTS, Resolved, resolve

__all__ = ["DEFAULTS", "GROUPS", "Resolved", "Settings", "grouped", "of_settings", "resolve"]
