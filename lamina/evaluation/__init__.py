"""What a trained model can do: perplexity on any text, and the tasks of lm-evaluation-harness."""
