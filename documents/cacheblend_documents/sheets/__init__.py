"""Workbooks, and tables in text files."""
