"""Masked sums: the coordinator learns only the sum of a group's adapters (docs/masked-sums.md)."""
