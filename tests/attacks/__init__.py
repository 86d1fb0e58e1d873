"""Attempts to break a patched model, one family of attacks per file, for `attack.py`."""
