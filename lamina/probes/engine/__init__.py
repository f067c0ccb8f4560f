"""Run probes: registry, forward passes over the text, and shared tools."""
