"""Evaluation of trained models: perplexity on any text, and the tasks of lm-evaluation-harness."""
