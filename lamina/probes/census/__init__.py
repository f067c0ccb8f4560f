"""Find the placement of a checkpoint by measurements."""
