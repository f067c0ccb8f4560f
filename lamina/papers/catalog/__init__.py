"""The catalog of studies: each is a YAML file, with the claims that it judges in a Python file of the same name."""
