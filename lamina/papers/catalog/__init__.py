"""The studies that can be run: each a YAML file, and beside it the claims that it judges."""
