"""Which placement a checkpoint has, found by measuring it."""
