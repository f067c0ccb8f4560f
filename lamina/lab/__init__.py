"""The lab: what reproduces the papers, and what works after pretraining. Nothing outside depends on it."""
