"""Tables and figures of both papers by command: ``python -m bench.paper``."""
