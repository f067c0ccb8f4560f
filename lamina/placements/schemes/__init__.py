"""The placements, one file each."""
