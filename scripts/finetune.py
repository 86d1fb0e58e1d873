"""Fine-tune a model on labeled text: `python -m hf_posenc.training.finetune` in a clone of the repository."""

from hf_posenc.evaluation import terminals
from hf_posenc.training.finetune import main

if __name__ == "__main__":
    terminals.set_up()
    main()
