"""The placement of a checkpoint, found by measuring it."""
