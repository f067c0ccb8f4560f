"""Preflight: the first steps of a planned run, measured layer by layer, and a verdict on the whole run."""
