"""Commands that measure and print tables, and modules that they share."""
