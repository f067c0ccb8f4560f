"""`lamina probe`: measure a checkpoint, and write a folder with tables and figures."""
