"""Fine-tune a model on labeled text. The model can be unpatched, patched by this command, or already patched.

Examples:
    python -m hf_posenc.training.finetune --model_name_or_path bert-base-uncased --position_encoding alibi \\
       --train_file train.csv --validation_file validation.csv --output_dir bert-alibi-classifier
    python -m hf_posenc.training.finetune --task question-answering --train_file train.json …
    accelerate launch --multi_gpu -m hf_posenc.training.finetune …

Columns and metrics of each task:
    sequence-classification   A text and a label (string or integer). Metrics: accuracy and macro-F1.
    token-classification      Words and a label per word, as lists or strings separated by spaces. Metrics: accuracy of words,
                              and precision, recall, and F1 of entities (seqeval), whose labels have the prefixes B- and I-.
    question-answering        `question`, `context`, and `answers` as in SQuAD: {"text": […], "answer_start": […]}. Both lists
                              are empty if there is no answer. Metrics: exact match and F1.

The command writes the model, its tokenizer, and all_results.json to --output_dir.
"""

import argparse

import hf_posenc
from hf_posenc.evaluation import terminals
from hf_posenc.training import flags, loop, models
from hf_posenc.training.classification import SequenceClassification, TokenClassification
from hf_posenc.training.question_answering import QuestionAnswering
from hf_posenc.training.supervised import Supervised

TASKS: dict[str, type[Supervised]] = {
    "sequence-classification": SequenceClassification,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.argument_parser(__doc__)
    add = parser.add_argument_group("fine-tuning").add_argument
    add("--task", choices=TASKS, default="sequence-classification", help="task")
    add("--label_column", default="label", help="column that contains the labels")
    add("--text_length", type=flags.at_least(1), help=flags.TEXT_LENGTH_HELP)
    add("--doc_stride", type=flags.at_least(0), default=128, help="overlap of the pieces of a context in tokens")
    add("--max_question_length", type=flags.at_least(1), default=64, help="maximum length of a question in tokens")
    add("--max_answer_length", type=flags.at_least(1), default=30, help="maximum length of a predicted answer in tokens")
    arguments = flags.parse(parser, argv)
    for task in TASKS.values():
        for name in set(task.flags) - set(TASKS[arguments.task].flags):
            if getattr(arguments, name) != parser.get_default(name):
                parser.error(f"--{name} doesn't apply to --task {arguments.task}. Omit it.")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    accelerator = flags.start(arguments)
    tokenizer = models.load_tokenizer(arguments.model_name_or_path)
    task = TASKS[arguments.task](accelerator, arguments, tokenizer)
    model = models.load_model(arguments, task.kind, tokenizer, task.adapt)
    length = models.text_length(arguments, arguments.text_length, model, tokenizer)
    report = hf_posenc.inspect(model)
    accelerator.print(f"{report}\n  texts are truncated to {length} tokens")
    splits = task.prepare(accelerator, length)
    models.warn_of_length(accelerator, arguments, model, splits["train"], length)
    about = {"text_length": length, "train_samples": None if arguments.streaming else len(splits["train"])}
    loop.train(accelerator, arguments, task, model, tokenizer, splits, "all_results", lambda: about)


if __name__ == "__main__":
    terminals.set_up()
    main()
