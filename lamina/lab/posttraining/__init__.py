"""Training after pretraining on TRL's trainers: fine-tuning on instructions, reward models, and policies."""
