"""The client's side of split learning: the model that the training loop and text generation use."""
