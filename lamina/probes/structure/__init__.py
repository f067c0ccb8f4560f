"""Where a model's layers, sub-layers and norms are, found by following tensors."""
