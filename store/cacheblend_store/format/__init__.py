"""What a key, a record and a blob are, byte for byte."""
