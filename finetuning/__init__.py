"""Fine-tuning for whole and split models: base model, adapters, data, training loop and metrics.

Nothing in this package depends on federated learning.
"""
