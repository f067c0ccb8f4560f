from training.tiny_runs import corpus, session_cache, shared_cache  # noqa: F401
