"""Classify images: labeled images, the classifier's objective, and images for probes."""
