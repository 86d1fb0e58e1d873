"""Train a masked language model, from a checkpoint or from scratch.

Examples:
    python -m hf_posenc.training.train_mlm --model_name_or_path bert-base-uncased --position_encoding alibi \\
        --model_max_length 1024 --train_file texts.txt --validation_split_percentage 5 --packing --output_dir bert-alibi
    accelerate launch --multi_gpu -m hf_posenc.training.train_mlm …

A text file has one text per line. The command writes the model, its tokenizer, and all_results.json to --output_dir.
"""

import random
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, DataCollatorForTokenClassification

from hf_posenc.evaluation import terminals
from hf_posenc.training import data, flags, language_modeling, models


class MaskedLanguageModeling(language_modeling.LanguageModeling):
    """Predicts masked tokens.

    Masks depend on the number of the example in the stream. They differ between epochs, but not between batch sizes or
    numbers of processes.
    """

    def __init__(self, tokenizer: Any, mlm_probability: float, seed: int) -> None:
        self.seed = seed
        self.masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=mlm_probability)
        self.pad = DataCollatorForTokenClassification(tokenizer)

    def collate(self, rows: data.Rows, step: int | None = None) -> Any:
        return self.pad([self._masked(number, row["input_ids"]) for number, row in rows])

    def _masked(self, number: int, ids: list[int]) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed} {number}").getrandbits(63))
        self.masking.generator = generator
        inputs, labels = self.masking.torch_mask_tokens(torch.tensor([ids]))
        return {"input_ids": inputs[0].tolist(), "labels": labels[0].tolist()}


def main(argv: list[str] | None = None) -> None:
    parser = language_modeling.parser(__doc__)
    between = flags.number(float, "a number between 0 and 1", lambda value: 0 < value < 1)
    parser.add_argument("--mlm_probability", type=between, default=0.15, help="probability of masking a token")
    arguments = flags.parse(parser, argv)
    accelerator = flags.start(arguments)
    tokenizer = models.load_tokenizer(arguments.model_name_or_path)
    if tokenizer.mask_token is None:
        raise SystemExit(
            f"The tokenizer of {arguments.model_name_or_path} has no mask_token. Use hf_posenc.training.train_clm instead."
        )
    task = MaskedLanguageModeling(tokenizer, arguments.mlm_probability, arguments.seed)
    language_modeling.run(accelerator, arguments, task, AutoModelForMaskedLM, tokenizer)


if __name__ == "__main__":
    terminals.set_up()
    main()
