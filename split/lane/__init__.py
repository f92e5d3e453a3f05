"""Lanes: the protocol over gRPC, with the threads it takes."""
