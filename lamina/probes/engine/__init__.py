"""What runs probes: their registry, the passes over the text, and what a probe is given."""
