"""The base model and what is computed with all of it."""
