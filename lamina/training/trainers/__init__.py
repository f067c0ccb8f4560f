"""What Lamina adds to transformers' Trainer and to TRL's trainers alike."""
