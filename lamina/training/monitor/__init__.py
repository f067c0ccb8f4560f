"""Monitor a training run: measure each layer at each step, raise alarms, stop diverged runs and write records."""
