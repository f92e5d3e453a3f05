"""The training loop, its optimizer, and the continual-learning penalty."""
