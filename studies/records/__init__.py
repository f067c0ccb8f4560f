"""Records of Lamina's studies: a folder per study and scale."""
