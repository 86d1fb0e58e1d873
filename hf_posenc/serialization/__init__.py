"""Saving and loading: files, the code saved with a checkpoint, and the mixins of configs and models."""
