"""The tokenizer that lies beside a model."""

from typing import Any

from transformers import AutoTokenizer
from transformers.utils import has_file

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    *("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),  # the only files of older models
)


def load_tokenizer(model: str) -> Any:
    """The tokenizer saved with a model, or None. (Without files, AutoTokenizer would return an empty one.)"""
    return AutoTokenizer.from_pretrained(model) if any(has_file(model, name) for name in TOKENIZER_FILES) else None
