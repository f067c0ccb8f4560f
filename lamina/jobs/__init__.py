"""What every job stands on: its folder, what is written into it, how it is resumed and how it ends. Loads no torch."""
