"""Train many models to answer one question."""
