"""Flower strategies, named after the papers they come from."""
