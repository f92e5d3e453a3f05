"""Attach, exchange, save and read adapters."""
