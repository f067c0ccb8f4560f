"""What each layer does, on any Hugging Face checkpoint: one file per probe."""
