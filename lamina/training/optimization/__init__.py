"""Optimization of a run: parameter groups, learning rates, and the order of the training blocks."""
