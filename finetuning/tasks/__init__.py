"""The papers' tasks: their data, prompts and metrics (``docs/tasks.md``)."""
