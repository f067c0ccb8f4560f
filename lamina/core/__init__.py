"""Tools for all packages: checks of users' values, safe reading of files, and registries."""
