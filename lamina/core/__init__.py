"""Tools for every room: values from users, safe reading of files, registries."""
