"""Reading of texts and packing of their tokens into blocks."""
