"""Models, data, and checkpoints of the labs."""
