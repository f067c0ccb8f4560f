"""A run's parameter groups, learning rates and order of training blocks."""
