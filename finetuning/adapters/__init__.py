"""Adapters: attached, exchanged, saved and read back."""
