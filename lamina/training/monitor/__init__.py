"""The monitor of a training run: what each layer does at each step, the alarms, the guard, and the records."""
