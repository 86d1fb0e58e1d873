"""Figures of encodings, of models, and of what was measured."""
