"""Schedules, by which clients share the server's blocks (FL-GLM section 3.3): a module each."""
