"""Changing the positions of a model: patch, unpatch, convert, extend, from_v4."""
