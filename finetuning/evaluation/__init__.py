"""Held-out losses, generated answers and their scores."""
