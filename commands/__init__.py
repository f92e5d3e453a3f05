"""``chambers``: the commands for people. Each is one file; heavy libraries load when it runs."""
