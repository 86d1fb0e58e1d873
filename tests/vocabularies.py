"""Tokenizers for the words of conftest. Each word is one token, and BERT's special tokens come first."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from conftest import WORDS

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def of_bert(folder, words=WORDS):
    """BERT's tokenizer. Its vocabulary is written to a directory."""
    (folder / "vocab.txt").write_text("\n".join([*VOCABULARY[:5], *words]))
    return BertTokenizer(str(folder / "vocab.txt"))


def of_words(vocabulary=VOCABULARY, **special):
    """A tokenizer that adds no special tokens to a text. Besides `[UNK]`, it has only the `special` tokens."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", model_input_names=names, **special)
