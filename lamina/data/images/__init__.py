"""Labeled images in, tensors out: folders, data sets of the hub, and files of pixels."""
