from training.tiny_runs import corpus  # noqa: F401
