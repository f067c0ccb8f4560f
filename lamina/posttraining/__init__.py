"""After pretraining: fine-tuning on instructions, reward models, and policies, on TRL's trainers."""
