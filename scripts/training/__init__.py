"""What all training scripts share: flags, rows and their order, models, checkpoints, and a loop that survives a kill."""
