"""``chambers``: the command-line tool. Heavy libraries are imported only by commands, when run."""
