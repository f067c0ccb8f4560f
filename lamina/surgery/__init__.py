"""Edit a trained model: remove layers, or change the norm placement."""
