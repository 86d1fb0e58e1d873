"""Train a causal language model, from a checkpoint or from scratch.

Examples:
    python -m hf_posenc.training.train_clm --model_name_or_path gpt2 --position_encoding rope --model_max_length 2048 \\
        --train_file texts.txt --validation_split_percentage 5 --packing --output_dir gpt2-rope
    accelerate launch --multi_gpu -m hf_posenc.training.train_clm …

A text file has one text per line. The command writes the model, its tokenizer, and all_results.json to --output_dir.
"""

from typing import Any

from transformers import AutoModelForCausalLM, DataCollatorWithPadding

from hf_posenc.evaluation import terminals
from hf_posenc.training import data, flags, language_modeling, models


class CausalLanguageModeling(language_modeling.LanguageModeling):
    """Predicts every token except the first. Padding is determined by the mask, because its token can also end texts."""

    shift = 1

    def __init__(self, tokenizer: Any) -> None:
        self.pad = DataCollatorWithPadding(tokenizer)

    def collate(self, rows: data.Rows, step: int | None = None) -> Any:
        batch = self.pad([{"input_ids": row["input_ids"]} for _, row in rows])
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch


def main(argv: list[str] | None = None) -> None:
    arguments = flags.parse(language_modeling.parser(__doc__), argv)
    accelerator = flags.start(arguments)
    tokenizer = models.load_tokenizer(arguments.model_name_or_path)
    language_modeling.run(accelerator, arguments, CausalLanguageModeling(tokenizer), AutoModelForCausalLM, tokenizer)


if __name__ == "__main__":
    terminals.set_up()
    main()
