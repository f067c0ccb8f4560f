"""`lamina probe`: measures a checkpoint, and writes a folder with tables and figures."""
