"""The base of every job: its folder, the files in it, how it is resumed and how it ends. Does not load torch."""
