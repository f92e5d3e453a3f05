"""The parts of a split model, without network communication."""
