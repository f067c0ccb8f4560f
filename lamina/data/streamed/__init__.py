"""A corpus that is read, tokenized and packed while training goes on."""
