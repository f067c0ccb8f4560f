"""Training after pretraining with TRL's trainers: fine-tuning on instructions, reward models, and policies."""
