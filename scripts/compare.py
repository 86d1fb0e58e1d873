"""Train models with several encodings and compare them by length: `python -m experiments.compare`, from any directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # experiments/ is not installed
from experiments.compare import main
from hf_posenc.evaluation import terminals

if __name__ == "__main__":
    terminals.set_up()
    main()
