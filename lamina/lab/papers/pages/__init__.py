"""Tables and figures of a study with claims, for its page, for the docs, and for a paper."""
