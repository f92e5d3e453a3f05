"""Measurements; each is a command that prints a table."""
