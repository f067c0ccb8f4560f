"""The objectives: one file each, found by the head that the backbone takes."""
