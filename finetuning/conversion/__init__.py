"""Convert checkpoints that need remote code to equivalent ``transformers`` model classes."""
