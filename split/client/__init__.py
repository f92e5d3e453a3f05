"""The client's side: the split model that the training loop and text generation use."""
