"""Parameter groups, learning rates and the order of the training blocks of a run."""
