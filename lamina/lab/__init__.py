"""Reproduce papers, classify images, and train models after pretraining. No other package depends on ``lamina.lab``."""
