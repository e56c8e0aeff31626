"""Presentations."""
