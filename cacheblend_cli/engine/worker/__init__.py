"""Everything that runs on a device for an answer, behind inputs of plain data."""
