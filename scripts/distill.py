"""Distill a patched model from its original: `python -m hf_posenc.training.distill` in a clone of the repository."""

from hf_posenc.evaluation import terminals
from hf_posenc.training.distill import main

if __name__ == "__main__":
    terminals.set_up()
    main()
