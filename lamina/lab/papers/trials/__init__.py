"""Trials: their identity, the key under which all studies share them, and their stored results."""
