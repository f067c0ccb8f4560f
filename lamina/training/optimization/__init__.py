"""How a run's weights are updated: parameter groups, learning rates, and which blocks each step trains on."""
