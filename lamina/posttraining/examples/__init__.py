"""What is trained on: rows of files and data sets as examples, and examples as tokens."""
