"""Prepares the model to measure and its texts.

Diagnostics run a copy that shares the given model's tensors. The given model never changes, so other threads can run it.

Shapes: L tokens, H heads, D hidden_size.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.encodings import GreaterThan, checked_value, short_repr
from hf_posenc.inspection import inspect
from hf_posenc.modeling.sentence_transformers import is_sentence_transformer
from hf_posenc.modeling.text_batches import INPUTS, INTEGERS, MASK
from hf_posenc.serialization.tokenizer_files import check_ids, check_known
from hf_posenc.signatures import argument_names, reads_tokens

Texts = Iterable[str] | Mapping[str, Tensor] | Tensor
"""Strings, a batch of tensors `[N, L]` (input_ids with an optional attention_mask and token_type_ids), or input_ids."""


@dataclass(frozen=True)
class ModelRunner:
    """A model in eval mode that returns its attention weights.

    name: name of the given model's class.
    tokenizer: None if there is none.
    usable: maximum length in tokens. None if there is no limit or it is unknown.
    """

    model: Any
    name: str
    tokenizer: Any
    usable: int | None

    @property
    def stack(self) -> Any:
        """The model without its head."""
        return self.model.base_model

    @property
    def vocabulary(self) -> int:
        return len(self.embedding.weight)

    @property
    def embedding(self) -> Any:
        """The module that embeds tokens. Raises ValueError for a model without one (CANINE)."""
        try:
            return self.stack.get_input_embeddings()
        except NotImplementedError:
            raise ValueError(f"{self.name} has no single token embedding, so it can't be measured on texts.") from None

    @property
    def still(self) -> float:
        """The rounding error of log-odds in the model's dtype, in nats."""
        return max(1e-4, 4 * torch.finfo(self.model.dtype).eps)

    def read(self, texts: Texts, length: int | None, least: int = 2, special: bool = True) -> list[dict[str, Tensor]]:
        """Each text as name -> `[1, L]`, without padding.

        length: texts are truncated to this number of tokens and to the model's maximum length. None: no truncation.
        special: whether strings get special tokens. Without them, a string has only input_ids.

        Raises ValueError for texts of fewer than `least` tokens, unknown IDs, and batches with other inputs.
        """
        if length is not None:
            checked_value("length", length, Annotated[int, GreaterThan(least - 1)])
            length = length if self.usable is None else min(length, self.usable)
        rows = list(self._rows(texts, length, special))
        if not rows:
            raise ValueError("texts is empty. Pass texts, or a batch of input_ids.")
        check_known(self.tokenizer, (row["input_ids"] for row in rows))
        for place, row in enumerate(rows):
            ids = row["input_ids"]
            if ids.shape[1] < least:
                raise ValueError(f"Text {place} has {ids.shape[1]} tokens, but {least} are needed. Pass longer texts.")
            check_ids(ids, self.embedding, f"text {place}")
        return [{name: values.to(self.model.device) for name, values in row.items()} for row in rows]

    def _rows(self, texts: Any, length: int | None, special: bool) -> Iterable[dict[str, Tensor]]:
        if isinstance(texts, Tensor):
            texts = {"input_ids": texts}
        if isinstance(texts, Mapping):
            ids = texts.get("input_ids")
            taken = {*argument_names(self.stack)} - {*INPUTS, MASK}
            if other := [name for name in texts if name in taken and texts[name] is not None]:
                allowed = ", ".join((*INPUTS, MASK))
                raise ValueError(f"texts contains {other[0]!r}, which isn't used. Pass only {allowed}.")
            if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in INTEGERS:
                raise ValueError("texts is a batch without input_ids. Add them, an integer tensor [N, L].")
            names = [name for name in INPUTS if texts.get(name) is not None]
            for name in (*names, MASK):
                given = texts.get(name)
                if given is not None and (not isinstance(given, Tensor) or given.shape != ids.shape):
                    form = f"has shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"is a {type(given).__name__}"
                    raise ValueError(f"{name} {form}, but must have shape {tuple(ids.shape)}, like input_ids.")
            mask = texts.get(MASK)
            shown_tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            for row, kept in enumerate(shown_tokens):
                yield {name: texts[name][row][kept][None, :length] for name in names}
            return
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ValueError(f"texts={short_repr(texts)[:100]} must be a list of strings, or a batch of input_ids.")
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"texts contains {short_repr(text)[:100]}. Pass strings, or one batch of input_ids.")
            settings = {"truncation": True, "max_length": length} if length else {"verbose": False}
            given = self.required_tokenizer()(text, add_special_tokens=special, **settings)
            yield {name: torch.tensor([given[name]]) for name in INPUTS[: 1 + special] if name in given}

    def required_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("texts are strings, which need a tokenizer. Pass tokenizer=…, or input_ids.")
        return self.tokenizer

    @torch.no_grad()
    def attentions(self, row: Mapping[str, Tensor]) -> Tensor:
        """The attention weights of one text, `[layers, H, L, L]`, float64, on the CPU.

        Raises ValueError for a model that doesn't return them, or returns scores instead (SqueezeBERT).
        """
        output = self.stack(**row, use_cache=False, return_dict=True, output_attentions=True)
        size = (row["input_ids"].shape[1],) * 2
        given = getattr(output, "attentions", None) or ()
        found = [each[0] for each in given if isinstance(each, Tensor) and each.ndim == 4 and each.shape[-2:] == size]
        if not found:
            raise ValueError(
                f"{self.name} doesn't return the attention weights of all its tokens. Use a diagnostic without them, such as "
                "receptive_field or order_sensitivity."
            )
        if len({len(each) for each in found}) > 1:
            raise ValueError(f"The layers of {self.name} have different numbers of heads, so they don't fit into one table.")
        weights = torch.stack(found).double().cpu()
        # Rounding in bfloat16 adds less than 0.1, and with an attention sink, the sum is below 1.
        if weights.min() < 0 or weights.sum(-1).max() > 1.1:
            raise ValueError(
                f"{self.name} doesn't return normalized attention weights (values from {weights.min():.3g} to "
                f"{weights.max():.3g}). Use a diagnostic without them, such as receptive_field or order_sensitivity."
            )
        return weights

    def states(self, row: Mapping[str, Tensor]) -> Tensor:
        """The last hidden states of one text, `[L, D]`."""
        return self.stack(**row, use_cache=False, return_dict=True).last_hidden_state[0]


def prepare_model(model: Any, tokenizer: Any = None) -> ModelRunner:
    """Create a runner for a Transformers model, patched or original, or for the model of a SentenceTransformer.

    Raises ValueError for anything else, for an encoder-decoder, and for a model that doesn't read tokens.
    """
    if is_sentence_transformer(model):
        tokenizer, model = tokenizer or model.tokenizer, model[0].model
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} isn't a Transformers model. Pass the model itself, not a wrapper.")
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) and model.get_encoder() is not model:
        raise ValueError(f"{name} has an encoder and a decoder. Pass its encoder, model.get_encoder().")
    if tokenizer is not None and not (isinstance(tokenizer, PreTrainedTokenizerBase) or callable(tokenizer)):
        raise ValueError(f"tokenizer={short_repr(tokenizer)[:100]} must be a Transformers tokenizer.")
    if not reads_tokens(model.base_model):
        raise ValueError(f"{name} doesn't read tokens. Pass the part that reads text, such as model.text_model.")
    # Tensors in the memo of deepcopy are shared. Modules, hooks, and the config are copied.
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin: Any = copy.deepcopy(model, shared)
    twin.eval().set_attn_implementation("eager")
    return ModelRunner(twin, name, tokenizer, _usable(model))


def _usable(model: Any) -> int | None:
    try:
        return inspect(model).max_length
    except ValueError:  # unknown for unsupported models
        return None
