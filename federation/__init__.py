"""What the coordinator's and the institutions' apps share about a run."""
