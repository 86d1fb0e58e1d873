"""Train a causal language model: `python -m hf_posenc.training.train_clm` in a clone of the repository."""

from hf_posenc.evaluation import terminals
from hf_posenc.training.train_clm import main

if __name__ == "__main__":
    terminals.set_up()
    main()
