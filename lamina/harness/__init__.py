"""lm-evaluation-harness through its Python API: tasks by name, a model scored on them, no code run unasked."""
