"""Schedules: how clients share the server's blocks (FL-GLM section 3.3); one per module."""
