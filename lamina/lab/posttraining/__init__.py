"""Train with TRL after pretraining: fine-tune on instructions, or train reward models and policies."""
