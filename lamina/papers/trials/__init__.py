"""Trials: what one computes, the key under which all studies share it, and where its results are."""
