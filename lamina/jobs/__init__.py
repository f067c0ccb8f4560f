"""The base of every job: its folder and files, its resuming and its ending. Loads no torch."""
