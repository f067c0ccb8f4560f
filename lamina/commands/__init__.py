"""The commands of the command line, one module per command; each has ``run(argv) -> exit code``."""
