"""What a study with claims left, as tables and figures: for its page, for the docs, and for a paper."""
