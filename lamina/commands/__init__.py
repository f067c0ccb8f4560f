"""The commands of the command line. Each module has ``run(argv)``, which returns the exit code."""
