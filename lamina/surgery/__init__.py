"""Surgery on a trained model: removing layers, or changing the placement."""
