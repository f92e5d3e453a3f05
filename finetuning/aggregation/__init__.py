"""Averages of adapters, and caps on a single client's influence."""
