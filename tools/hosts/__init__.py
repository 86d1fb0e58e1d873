"""Tiny models of all model types, their inputs, checks, and verdicts."""
