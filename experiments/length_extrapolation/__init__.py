"""Modules of compare.py and extrapolation.py: tasks of any length, models, runs, resumable studies, tables, and the verdict."""
