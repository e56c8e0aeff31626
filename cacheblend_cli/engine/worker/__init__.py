"""All that runs on a device for an answer, behind inputs that are plain data."""
