"""Items that are changed at random each time they are drawn: masked blocks of text, augmented images."""
