"""The base model, and the computations that need all of it."""
