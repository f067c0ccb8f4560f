"""What a run records while it trains, and what ends it."""
