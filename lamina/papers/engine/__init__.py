"""Running studies: which trials are needed, in which order, and what they say about the claims."""
