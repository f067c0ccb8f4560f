"""Read texts, and cut their tokens into blocks for training."""
