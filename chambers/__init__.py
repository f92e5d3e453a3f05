"""``chambers``: the command-line tool. Heavy libraries are imported only when a command runs."""
