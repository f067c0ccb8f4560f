"""The registry of probes, the forward passes over the text, and tools for probes."""
