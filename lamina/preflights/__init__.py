"""Train a planned run's first steps, measure each layer, and predict whether the run will train."""
