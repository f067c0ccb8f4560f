"""Where documents come from: files, folders and data sets of the hub."""
