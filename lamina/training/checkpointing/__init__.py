"""Write, verify and resume from checkpoints."""
