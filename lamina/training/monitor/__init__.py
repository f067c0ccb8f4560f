"""Monitor training: measure each layer at each step, raise alarms, and stop diverged runs."""
