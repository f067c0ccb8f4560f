"""The commands of the command line. Each module has a function ``run(argv)`` that returns the exit code."""
