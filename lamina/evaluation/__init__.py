"""Evaluate trained models: the perplexity on any text, and the tasks of lm-evaluation-harness."""
