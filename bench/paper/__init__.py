"""Tables and figures of both papers, run again: ``python -m bench.paper``."""
