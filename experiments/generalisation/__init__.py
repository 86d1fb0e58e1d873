"""The parts of compare.py and generalise.py: tasks of any length, hosts, runs, studies that resume, tables, the verdict."""
