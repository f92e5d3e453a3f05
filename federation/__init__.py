"""Configuration, messages and status shared by the ServerApp and the ClientApps."""
