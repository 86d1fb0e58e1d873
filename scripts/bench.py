"""Measure speed and memory: `python -m benchmarks.bench`, from any directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed
from benchmarks.bench import main
from hf_posenc.evaluation import terminals

if __name__ == "__main__":
    terminals.set_up()
    main()
