"""Tools for all rooms: checks of users' values, safe reading of files, registries."""
