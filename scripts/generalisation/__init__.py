"""The parts of generalise.py: tasks of any length, tiny models, runs, a study that resumes, tables, figures, the verdict."""
