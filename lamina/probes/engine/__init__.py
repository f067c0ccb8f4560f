"""The engine of the probes: the registry, the forward passes over the text, and each probe's context."""
