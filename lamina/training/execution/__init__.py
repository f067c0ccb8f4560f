"""How a run uses its machines: processes, precision and compilation."""
