"""Changes of a trained model: layers taken out, or another placement put on it."""
