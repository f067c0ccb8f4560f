"""The monitor of a training run: measurements of each layer at each step, alarms, the divergence guard, and records."""
