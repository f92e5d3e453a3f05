"""Fine-tuning shared by both modes: base model, adapters, data, training loop and metrics.

Nothing in this package depends on federated learning.
"""
