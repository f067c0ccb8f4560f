"""Find a model's layers, sub-layers and norms by following tensors."""
