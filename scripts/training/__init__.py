"""The parts common to all training scripts: flags, rows, models, checkpoints, and a loop that survives a kill."""
