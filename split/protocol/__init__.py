"""The lane protocol as bytes and states: no threads, no sockets, no models."""
