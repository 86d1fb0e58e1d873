"""Experiments that compare encodings. Only commands and tests import them."""
