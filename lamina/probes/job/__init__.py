"""`lamina probe`: a checkpoint in, a folder with tables and figures out."""
