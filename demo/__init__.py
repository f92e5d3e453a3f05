"""Runs of the app in simulation by one command, on a SuperLink of their own."""
