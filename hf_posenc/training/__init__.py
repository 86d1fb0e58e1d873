"""Training with Accelerate: commands, tasks, data, checkpoints, and a loop that survives a kill."""
