"""Saving and loading: files, the code that travels with a checkpoint, the mixins of configs and models."""
