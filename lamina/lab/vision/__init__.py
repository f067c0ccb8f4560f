"""Classify images: read labeled images, train classifiers, and supply images for probes."""
