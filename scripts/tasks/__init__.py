"""Rows, losses and metrics of each task."""
