"""Fine-tuning shared by both ways of working: base model, adapters, data, training loop, metrics.

Nothing in this package depends on federated learning.
"""
