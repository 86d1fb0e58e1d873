"""Texts that the experiments measure and train with."""
