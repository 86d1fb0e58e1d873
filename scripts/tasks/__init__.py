"""What models are trained for: rows, losses and metrics of each task."""
