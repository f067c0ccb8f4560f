"""Choose a run's parameter groups, learning rates and order of training data."""
