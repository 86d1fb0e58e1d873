"""The parts of compare.py and extrapolation.py: tasks of any length, hosts, runs, studies that resume, tables, the verdict."""
