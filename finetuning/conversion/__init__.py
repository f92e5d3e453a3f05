"""Checkpoints that need remote code, converted to classes of transformers that compute the same."""
