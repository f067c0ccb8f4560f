"""`lamina diagnose`: what left first in a run, how early that could be seen, and what to change."""
