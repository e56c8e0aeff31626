"""E-mails and their calendar events."""
