"""What a model is trained to predict: one file for each objective, found by the head that the backbone takes."""
