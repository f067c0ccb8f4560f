"""The engine of the probes: their registry, the passes over the text, and the context that a probe gets."""
