"""Running studies: which trials are needed, in which order, and the verdicts on the claims."""
