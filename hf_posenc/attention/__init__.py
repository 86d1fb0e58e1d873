"""Applies rotations and score biases in attention functions."""
