"""A run's use of its machines: processes, precision and compilation."""
