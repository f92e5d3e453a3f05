"""Flower's programs, with what an open machine or network needs beyond Flower 1.41.

``chambers-superlink``, ``chambers-superexec`` and ``chambers-supernode`` take the options of
Flower's programs. Each module replaces names inside Flower, which a new version may change: test
them before widening the version bounds of ``flwr``. Their docstrings describe Flower's defects.
"""
