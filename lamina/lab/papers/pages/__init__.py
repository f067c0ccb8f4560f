"""Make a study's tables and figures for its page, for the docs, and for a paper."""
