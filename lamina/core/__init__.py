"""Tools that all packages use: checks of users' values, safe reading of files, registries."""
