"""Convert, train, and compare MiniLM: `python -m experiments.demo`, from any directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # experiments/ is not installed
from experiments.demo import main
from hf_posenc.evaluation import terminals

if __name__ == "__main__":
    terminals.set_up()
    main()
