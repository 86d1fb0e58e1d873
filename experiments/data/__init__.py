"""Texts for training and evaluation in the experiments."""
