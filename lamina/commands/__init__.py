"""One module a command of the command line; each has ``run(argv) -> exit code``."""
