"""Retrieval, the texts for it, and records of measurements."""
