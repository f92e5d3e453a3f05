"""What both ways of working share: base model, adapters, data, training loop, metrics.

Nothing in this package knows that training is federated.
"""
