"""Measure what each layer does, on any Hugging Face checkpoint. Each probe is one file."""
