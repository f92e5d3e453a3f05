"""From rows on disk to micro-batches: reading, partitioning, tokenization and batching."""
