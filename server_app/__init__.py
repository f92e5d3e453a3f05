"""Flower's ServerApp: configuration, strategy, checkpoints and results."""
