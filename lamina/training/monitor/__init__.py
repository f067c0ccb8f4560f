"""The monitor of a training run: measures of each layer at each step, the alarms, the guard, and the records."""
