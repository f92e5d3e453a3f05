"""Experiments described in files: runs, measurements of their models, tables and plots."""
