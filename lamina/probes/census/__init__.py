"""Find a checkpoint's norm placement from measurements."""
