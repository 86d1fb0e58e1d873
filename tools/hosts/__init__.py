"""Tiny models of all model types, with their inputs, checks, and verdicts."""
