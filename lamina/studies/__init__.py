"""Many trials, one question."""
