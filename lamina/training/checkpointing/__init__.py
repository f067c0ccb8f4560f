"""Checkpoints: writing, verifying, resuming and rolling back."""
