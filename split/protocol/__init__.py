"""The lane protocol: message formats and state machines, without threads, sockets or models."""
