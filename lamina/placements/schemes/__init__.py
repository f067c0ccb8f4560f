"""The published norm placements. Each file has a placement and its variants."""
