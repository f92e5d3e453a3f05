"""Lanes: the lane protocol over gRPC, with its threads."""
