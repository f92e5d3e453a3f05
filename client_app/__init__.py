"""What runs at an institution: answering query, train and evaluate messages on private data."""
