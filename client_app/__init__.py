"""Flower's ClientApp: answer query, train and evaluate messages on an institution's data."""
