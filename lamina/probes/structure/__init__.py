"""A model's layers, sub-layers and norms, found by following tensors."""
