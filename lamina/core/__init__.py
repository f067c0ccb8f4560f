"""What every room may use: values from users, files that are read safely, registries."""
