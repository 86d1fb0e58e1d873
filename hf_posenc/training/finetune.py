"""Fine-tune a model on labelled text: a stock one, one that is patched now, or one that was patched before.

    python -m hf_posenc.training.finetune --model_name_or_path bert-base-uncased --position_encoding alibi \\
       --train_file train.csv --validation_file validation.csv --output_dir bert-alibi-classifier
    python -m hf_posenc.training.finetune --task question-answering --train_file train.json …
    accelerate launch --multi_gpu -m hf_posenc.training.finetune …

What a row has, by task, and what is measured:
    sequence-classification   a text, and a label: string or integer; accuracy and macro-F1
    token-classification      words, and as many labels: lists, or strings with blanks between; the same, over words
    question-answering        `question`, `context` and `answers` as in SQuAD: {"text": […], "answer_start": […]}, lists that
                              are empty where there is no answer; exact match and F1
The model, its tokenizer and all_results.json are written to --output_dir.
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
    add("--task", choices=TASKS, default="sequence-classification")
    add("--label_column", default="label")
    add("--text_length", type=flags.at_least(1), help=flags.TEXT_LENGTH_HELP)
    add("--doc_stride", type=flags.at_least(0), default=128, help="tokens that pieces of a context share: no answer has more")
    add("--max_question_length", type=flags.at_least(1), default=64, help="tokens that questions are cut to")
    add("--max_answer_length", type=flags.at_least(1), default=30, help="tokens of the longest answer given")
    arguments = flags.parse(parser, argv)
    for task in TASKS.values():
        for name in set(task.flags) - set(TASKS[arguments.task].flags):
            if getattr(arguments, name) != parser.get_default(name):
                parser.error(f"--{name} is of no use with --task {arguments.task}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    accelerator = flags.start(arguments)
    tokenizer = models.load_tokenizer(arguments.model_name_or_path)
    task = TASKS[arguments.task](accelerator, arguments, tokenizer)
    model = models.load_model(arguments, task.kind, tokenizer, task.adapt)
    length = models.text_length(arguments, arguments.text_length, model, tokenizer)
    report = hf_posenc.inspect(model)
    accelerator.print(f"{report}\n  texts are cut to {length} tokens")
    splits = task.prepare(accelerator, length)
    models.warn_of_length(accelerator, arguments, model, splits["train"], length)
    about = {"text_length": length, "train_samples": None if arguments.streaming else len(splits["train"])}
    loop.train(accelerator, arguments, task, model, tokenizer, splits, "all_results", lambda: about)


if __name__ == "__main__":
    terminals.set_up()
    main()
