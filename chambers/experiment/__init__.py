"""Experiments as data: runs through the app, measurements of their models, tables and plots."""
