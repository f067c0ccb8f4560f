"""The layer monitor in anybody's training: a callback for Trainer and TRL, and ``watch`` for a loop of one's own."""
