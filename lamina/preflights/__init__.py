"""Preflight: the first steps of a planned run, looked at layer by layer, and a verdict on the rest of it."""
