"""How a run updates its weights: parameter groups, learning rates, and the blocks of each step."""
