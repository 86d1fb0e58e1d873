"""What the training scripts share: flags, rows and their order, models, and a loop that survives a kill."""
