"""Checkpoints: written whole, verified, resumed from, and rolled back to."""
