"""The updates of a run's weights: parameter groups, learning rates, and the blocks of each step."""
