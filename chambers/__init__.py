"""``chambers``: the commands for people. Heavy libraries load when one runs."""
