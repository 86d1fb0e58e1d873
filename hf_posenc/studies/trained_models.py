"""Save a trained model of a study (--save), with its tokenizer."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_posenc.serialization.atomic import replaced
from hf_posenc.serialization.tokenizer_files import required_tokenizer
from hf_posenc.studies import models
from hf_posenc.studies.tasks import Task
from hf_posenc.studies.texts import BYTES


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


def save_trained(model: PreTrainedModel, name: str, task: Task, directory: Path) -> None:
    """Save a trained model atomically, with a tokenizer if it reads texts. name: of the model in a study."""
    tokenizer = None
    if source := models.directory_of(name):
        tokenizer = required_tokenizer(source)
    elif task.texts:
        tokenizer = byte_tokenizer()
    with replaced(directory) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
