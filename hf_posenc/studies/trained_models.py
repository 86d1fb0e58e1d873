"""Save a trained model of a study (--keep), with its tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_posenc.evaluation import records
from hf_posenc.serialization.atomic import replaced
from hf_posenc.serialization.tokenizer_files import required_tokenizer
from hf_posenc.studies import models
from hf_posenc.studies.tasks import Task
from hf_posenc.studies.texts import BYTES

RUN = "run.json"
"""The file of a saved model with the record of its run."""
COMPARED = ("scores", "losses", "digests")
"""Entries that identify the run of a saved model."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of models that read bytes: a token's ID is its byte. The mask token comes after the bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab={character: byte for byte, character in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="<mask>")
    assert made.mask_token_id == BYTES
    return made


def save_trained(model: PreTrainedModel, name: str, task: Task, record: dict[str, Any], directory: Path) -> None:
    """Save a trained model and its record atomically, with a tokenizer if it reads texts. name: of the model in a study."""
    tokenizer = None
    if source := models.directory_of(name):
        tokenizer = required_tokenizer(source)
    elif task.texts:
        tokenizer = byte_tokenizer()
    with replaced(directory) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        records.write(temporary / RUN, record)


def belongs(directory: Path, record: Mapping[str, Any]) -> bool:
    """Whether the model in a directory comes from the run with this record, and not from an earlier one of the same name."""
    file = directory / RUN
    if not file.is_file():
        return False
    found = records.read(file)
    return all(found[name] == record[name] for name in COMPARED)
