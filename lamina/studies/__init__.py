"""Studies: many runs that answer one question."""
