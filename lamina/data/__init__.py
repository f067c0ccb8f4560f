"""Read texts, and pack their tokens into blocks."""
