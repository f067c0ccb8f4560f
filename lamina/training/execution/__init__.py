"""Choose a run's devices, precision and compilation."""
