"""What runs at the coordinator: configuration, strategy, checkpoints and results."""
