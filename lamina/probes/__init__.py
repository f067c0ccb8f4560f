"""Measure what each layer of a model does. Each probe is one file."""
