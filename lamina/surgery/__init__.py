"""Surgery on a trained model: taking layers out, or putting another placement on it."""
