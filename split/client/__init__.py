"""The split model as the training loop and generation use it."""
