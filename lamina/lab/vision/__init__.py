"""Vision: labeled images in, a classifier's objective, and the images that a probe reads."""
