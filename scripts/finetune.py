"""Fine-tune a model to classify texts: a stock one, one that is patched now, or one that was patched before.

    python scripts/finetune.py --model_name_or_path bert-base-uncased --position_encoding alibi \\
        --train_file train.csv --validation_file validation.csv --output_dir bert-alibi-classifier
    torchrun --nproc_per_node 2 scripts/finetune.py …        # several processes, CPU (gloo) or GPU

The files have a text and a label in each row: CSV, or JSON with an object a line. The model, its tokenizer and
all_results.json are written to --output_dir.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from datasets import ClassLabel, Dataset, disable_progress_bars, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import get_token
from huggingface_hub.utils import HFValidationError, validate_repo_id
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    get_scheduler,
)
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import hf_posenc

FILE_KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json"}
DEFAULT_MAX_LENGTH = 512
"""Tokens that texts are cut to where the model itself has no limit."""


def position_encoding(text: str) -> Any:
    """A name as it is; text that starts as JSON does, read."""
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None


def at_least(low: int) -> Any:
    """The argparse type of integers from `low` on."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}: allowed is an integer from {low} on")
        return int(text)

    return integer


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="folder or Hub id of a model, patched or not")
    add(
        "--position_encoding",
        type=position_encoding,
        help='name, or JSON such as \'{"type": "rope", "theta": 5000}\'; default: the positions that the model has',
    )
    add("--train_file", type=Path, help="CSV or JSON")
    add("--validation_file", type=Path, help="CSV or JSON; without one, nothing is measured")
    add("--dataset_name", help="instead of --train_file: Hub id of a data set; its split `validation` is used, too")
    add("--dataset_config_name")
    add("--text_column", default="text")
    add("--label_column", default="label", help="strings or integers")
    add(
        "--max_length",
        type=at_least(1),
        help="tokens that texts are cut to, and with --position_encoding the longest input of the patched model; "
        f"default: the model's usable length, or {DEFAULT_MAX_LENGTH} where it has no limit",
    )
    add("--per_device_train_batch_size", type=at_least(1), default=8)
    add("--per_device_eval_batch_size", type=at_least(1), default=8)
    add("--learning_rate", type=float, default=5e-5)
    add("--weight_decay", type=float, default=0.0)
    add("--num_train_epochs", type=at_least(1), default=3)
    add("--max_train_steps", type=at_least(1), help="steps in all, whatever the epochs")
    add("--gradient_accumulation_steps", type=at_least(1), default=1)
    add("--lr_scheduler_type", default="linear")
    add("--num_warmup_steps", type=at_least(0), default=0)
    add("--seed", type=int, default=0)
    add("--output_dir", type=Path, required=True)
    add("--push_to_hub", action="store_true", help="with the account of HF_TOKEN or `hf auth login`")
    add("--hub_model_id", help="the repository to push to, such as me/bert-alibi-classifier")
    add("--hub_private_repo", action="store_true")
    parsed = parser.parse_args(arguments)
    if bool(parsed.train_file) == bool(parsed.dataset_name):
        parser.error("the texts come from --train_file or from --dataset_name: give one of the two")
    if parsed.dataset_config_name and not parsed.dataset_name:
        parser.error(f"--dataset_config_name {parsed.dataset_config_name} goes with --dataset_name")
    if parsed.push_to_hub != bool(parsed.hub_model_id):
        parser.error("--push_to_hub and --hub_model_id go together: give both or neither")
    if parsed.hub_private_repo and not parsed.push_to_hub:
        parser.error("--hub_private_repo goes with --push_to_hub")
    if parsed.push_to_hub:
        # What push_to_hub itself would refuse, but only after the training.
        try:
            validate_repo_id(parsed.hub_model_id)
        except HFValidationError as error:
            parser.error(f"--hub_model_id {parsed.hub_model_id}: {error}")
        if not get_token():
            parser.error("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN")
    return parsed


def read(file: Path) -> Dataset:
    """The rows of a local file. Raises SystemExit for one that is missing, empty or of another kind."""
    if file.suffix not in FILE_KINDS:
        raise SystemExit(f"{file} is none of the files that are read here: {', '.join(FILE_KINDS)}")
    if not file.is_file():
        raise SystemExit(f"{file} is not there, or no file")
    try:
        return load_dataset(FILE_KINDS[file.suffix], data_files=str(file), split="train")
    except (DatasetGenerationError, ValueError) as error:
        raise SystemExit(f"{file} can't be read: {error.__cause__ or error}") from None


def load_splits(arguments: argparse.Namespace) -> dict[str, Dataset]:
    """`train`, and `validation` if there is one, checked. Raises SystemExit with what is wrong with the data."""
    if arguments.train_file:
        splits = {"train": read(arguments.train_file)}
    else:
        loaded = load_dataset(arguments.dataset_name, arguments.dataset_config_name)
        if "train" not in loaded:
            raise SystemExit(f"the data set {arguments.dataset_name} has the splits {list(loaded)}, but no `train`")
        splits = {name: loaded[name] for name in ("train", "validation") if name in loaded}
    if arguments.validation_file:
        splits["validation"] = read(arguments.validation_file)
    for name, data in splits.items():
        check_columns(name, data, arguments.text_column, arguments.label_column)
    return splits


def check_columns(name: str, data: Dataset, text_column: str, label_column: str) -> None:
    """Raises SystemExit where a row has no text or no label, or the columns are missing or of the wrong types."""
    for flag, column in (("--text_column", text_column), ("--label_column", label_column)):
        if column not in data.column_names:
            raise SystemExit(f"the {name} data have the columns {data.column_names}, but no `{column}`: see {flag}")
    if not len(data):
        raise SystemExit(f"the {name} data have no rows")
    for row, (text, label) in enumerate(zip(data[text_column], data[label_column], strict=True), start=1):
        if text is None or label is None or text == "" or label == "":
            raise SystemExit(f"row {row} of the {name} data has no {'text' if text in (None, '') else 'label'}: leave it out")
        if not isinstance(text, str):
            raise SystemExit(f"`{text_column}` of the {name} data is to hold strings, but row {row} has {text!r}")
        if not isinstance(label, (str, int)):
            raise SystemExit(f"`{label_column}` of the {name} data is to hold strings or integers, but row {row} has {label!r}")


def label_names(splits: dict[str, Dataset], column: str) -> dict[Any, str]:
    """Each label of the training data -> its name; in sorted order, which is that of the ids.

    Raises SystemExit for less than two labels, and for validation labels that training doesn't have.
    """
    known = sorted(set(splits["train"][column]))
    if len(known) < 2:
        raise SystemExit(f"the only label in the train data is {known[0]!r}: to classify takes two")
    if unknown := set(splits.get("validation", {column: known})[column]) - set(known):
        raise SystemExit(f"the validation data have the labels {sorted(unknown)}, the train data {known} alone")
    feature = splits["train"].features[column]
    return {label: feature.int2str(label) if isinstance(feature, ClassLabel) else str(label) for label in known}


def load_model(arguments: argparse.Namespace, tokenizer: Any, names: list[str]) -> PreTrainedModel:
    """The classifier, patched if that is asked for. Raises SystemExit or ValueError for what can't be combined."""
    chosen = arguments.position_encoding
    # A config that has an encoding already says here whether it is this one; a stock config doesn't know the key.
    config = AutoConfig.from_pretrained(arguments.model_name_or_path, **({"position_encoding": chosen} if chosen else {}))
    classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if classifies and config.num_labels != len(names):
        raise SystemExit(
            f"{arguments.model_name_or_path} tells {config.num_labels} classes apart, and the data have {len(names)} "
            f"({', '.join(names)}): start from the model it was trained from"
        )
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    config.problem_type = "single_label_classification"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise SystemExit(f"the tokenizer of {arguments.model_name_or_path} has neither a pad_token nor an eos_token")
        tokenizer.pad_token = tokenizer.eos_token
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    # float32 whatever the file has: half-precision weights lose small updates (`accelerate launch --mixed_precision`
    # computes in half precision and updates in full).
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model_name_or_path, config=config, dtype=torch.float32)
    if chosen and not hasattr(config, "position_encoding"):
        model = hf_posenc.patch(model, chosen, max_length=arguments.max_length)
    return model


def text_length(max_length: int | None, report: Any, tokenizer: Any) -> int:
    """The tokens that texts are cut to. Raises SystemExit for a --max_length that doesn't fit the model."""
    usable, special = report.max_length, tokenizer.num_special_tokens_to_add()
    if max_length is None:
        return DEFAULT_MAX_LENGTH if usable is None else usable
    if usable is not None and max_length > usable:
        raise SystemExit(
            f"--max_length {max_length} is above the usable length of {report.model_class} ({report.encoding}), {usable} "
            "tokens: lower it, or give an unpatched model a --position_encoding"
        )
    if max_length <= special:
        raise SystemExit(f"--max_length {max_length} leaves no room for text beside {special} special tokens")
    return max_length


def endless(loader: DataLoader) -> Iterator[dict[str, Any]]:
    """The batches of epoch after epoch."""
    while True:
        yield from loader


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
    """Accuracy and macro-F1 over all processes' rows, with the share of the most frequent label beside them."""
    model.eval()
    predicted: list[int] = []
    expected: list[int] = []
    for batch in tqdm(loader, desc="evaluating", disable=not accelerator.is_main_process):
        answers, labels = accelerator.gather_for_metrics((model(**batch).logits.argmax(-1), batch["labels"]))
        predicted += answers.tolist()
        expected += labels.tolist()
    return {
        "eval_accuracy": float(accuracy_score(expected, predicted)),
        "eval_macro_f1": float(f1_score(expected, predicted, average="macro")),
        "eval_majority_share": max(Counter(expected).values()) / len(expected),
        "eval_samples": len(expected),
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    set_seed(arguments.seed)
    # A part that the loss doesn't reach (the pooler of some models) is no error in several processes.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        # The order of the texts follows from the seed alone, however many processes there are.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=arguments.seed),
        kwargs_handlers=[unused],
    )
    if not accelerator.is_main_process:
        disable_progress_bars()
    with accelerator.main_process_first():  # the others find the data in the cache
        splits = load_splits(arguments)
    names = label_names(splits, arguments.label_column)
    if "validation" not in splits:
        accelerator.print("no validation data: the model is trained and saved, and nothing is measured")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    classifier = load_model(arguments, tokenizer, list(names.values()))
    report = hf_posenc.inspect(classifier)
    max_length = text_length(arguments.max_length, report, tokenizer)
    accelerator.print(f"{report}\n  labels: {', '.join(names.values())}\n  texts are cut to {max_length} tokens")
    # Before the training, for it would be a pity after it.
    arguments.output_dir.mkdir(parents=True, exist_ok=True)

    ids = {label: i for i, label in enumerate(names)}

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = tokenizer(rows[arguments.text_column], truncation=True, max_length=max_length)
        return {**encoded, "labels": [ids[label] for label in rows[arguments.label_column]]}

    def loader(name: str, batch_size: int) -> DataLoader:
        with accelerator.main_process_first():
            data = splits[name].map(encode, batched=True, remove_columns=splits[name].column_names, desc=f"tokenizing {name}")
        pad = DataCollatorWithPadding(tokenizer)
        return accelerator.prepare(DataLoader(data, batch_size=batch_size, shuffle=name == "train", collate_fn=pad))

    batches = loader("train", arguments.per_device_train_batch_size)
    validation = loader("validation", arguments.per_device_eval_batch_size) if "validation" in splits else None
    steps_per_epoch = math.ceil(len(batches) / arguments.gradient_accumulation_steps)
    steps = arguments.max_train_steps or arguments.num_train_epochs * steps_per_epoch
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=arguments.learning_rate, weight_decay=arguments.weight_decay)
    # A prepared scheduler takes one step per process.
    scheduler = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.num_warmup_steps * accelerator.num_processes,
        num_training_steps=steps * accelerator.num_processes,
    )
    model, optimizer, scheduler = accelerator.prepare(classifier, optimizer, scheduler)

    step, losses = 0, []
    started = time.perf_counter()
    model.train()
    bar = tqdm(total=steps, desc="training", disable=not accelerator.is_main_process)
    stream = endless(batches)
    while step < steps:
        batch = next(stream)
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            # The mean over all processes, so that all of them stop together.
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if not math.isfinite(losses[-1]):
                raise SystemExit(f"the loss is {losses[-1]} at step {step + 1}: lower --learning_rate; nothing was saved")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{sum(losses[-10:]) / len(losses[-10:]):.4f}", refresh=False)
    bar.close()
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise SystemExit(f"after step {steps} the weights are not finite: lower --learning_rate; nothing was saved")
    metrics = evaluate(accelerator, model, validation) if validation else {}
    seconds = round(time.perf_counter() - started, 1)

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        classifier.save_pretrained(arguments.output_dir)
        if tokenizer.is_fast:
            # Else the cut of the training texts would stay in tokenizer.json.
            tokenizer.backend_tokenizer.no_truncation()
        tokenizer.model_max_length = report.max_length or VERY_LARGE_INTEGER
        tokenizer.save_pretrained(arguments.output_dir)
        record = {
            **metrics,
            "train_samples": len(splits["train"]),
            "steps": steps,
            "seconds": seconds,
            "processes": accelerator.num_processes,
            "max_length": max_length,
            "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
            "losses": [round(loss, 5) for loss in losses],
        }
        (arguments.output_dir / "all_results.json").write_text(json.dumps(record, indent=2))
        for name, value in metrics.items():
            print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
        print(f"{steps} steps in {seconds} s; model, tokenizer and all_results.json: {arguments.output_dir}")
        if arguments.push_to_hub:
            private = True if arguments.hub_private_repo else None
            hf_posenc.push_to_hub(classifier, arguments.hub_model_id, tokenizer=tokenizer, private=private)
    accelerator.end_training()


if __name__ == "__main__":
    main()
