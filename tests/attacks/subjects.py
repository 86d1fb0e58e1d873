"""The models that are attacked, each with the model that says what is right.

Shapes: B batch, L tokens, D hidden_size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

import hf_posenc
from tools.hosts.tiny import randomized

LENGTH, VOCABULARY = 48, 61
COMMON = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=LENGTH,
    vocab_size=VOCABULARY,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
HOSTS: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2),
    "llama": dict(COMMON, num_key_value_heads=2),
    "mistral": dict(COMMON, num_key_value_heads=2, sliding_window=6),
    "bert": COMMON,
    "mpnet": dict(COMMON, max_position_embeddings=LENGTH + 2, pad_token_id=1, bos_token_id=0),
    "distilbert": dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=LENGTH, vocab_size=VOCABULARY),
    "roberta": dict(COMMON, max_position_embeddings=LENGTH + 2, pad_token_id=1, bos_token_id=0),
}
"""Model type -> sizes."""
ITSELF = "itself"
"""In place of an encoding: the host's own positions, patched in; the stock model says what is right."""
COMPOSITIONS = ("relative_key_query", "learned+shaw", "sinusoidal+alibi", "sinusoidal+rope+relative+shaw")
OPTIONS: dict[str, dict[str, Any]] = {"logn": {"trained_length": 5, "scale": "learned"}}
"""Options by which an encoding acts on inputs as short as these, where those by default would not."""
OWN = "attack-"
"""How the names of encodings begin that the attacks define."""


def encodings() -> tuple[str, ...]:
    """All names that a model is attacked with."""
    ours = (name for name, kind in hf_posenc.list_encodings().items() if not name.startswith(OWN) and kind.axes == 1)
    return (ITSELF, *ours, *COMPOSITIONS)


@dataclass(frozen=True)
class Subject:
    """model: the one that is attacked. oracle: one that shares nothing with it, called once on whole texts without padding."""

    model: Any
    oracle: Any

    def expected(self, ids: Tensor, **more: Any) -> Tensor:
        """`[L] -> [L, D]`: the first output for one text."""
        with torch.no_grad():
            return self.oracle(ids[None], use_cache=False, **more)[0][0]


def stock(host: str, auto: Any = AutoModel, seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    return randomized(auto.from_config(CONFIG_MAPPING[host](**{**HOSTS[host], **changes})).eval())


def subject(host: str, encoding: str, auto: Any = AutoModel, **changes: Any) -> Subject:
    if encoding == ITSELF:
        return Subject(as_itself(stock(host, auto, **changes), host), stock(host, auto, **changes))
    model, oracle = (patched(stock(host, auto, **changes), encoding) for _ in range(2))
    if oracle._supports_sdpa:
        oracle.set_attn_implementation("eager")
    return Subject(model, oracle)


def patched(model: PreTrainedModel, encoding: str, **options: Any) -> PreTrainedModel:
    """A patched model, the encoding's parameters drawn from N(0, 1)."""
    return drawn(hf_posenc.patch(model, encoding, **{**OPTIONS.get(encoding, {}), **options}))


def drawn(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "posenc." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def as_itself(model: PreTrainedModel, host: str) -> Any:
    """A stock model patched with the positions that it has."""
    if host in ("llama", "mistral"):
        return hf_posenc.patch(model, "rope", theta=model.config.rope_parameters["rope_theta"])
    if host != "mpnet":
        return hf_posenc.patch(model, "learned", init="host")
    new: Any = hf_posenc.patch(model, "learned+t5", learned__init="host")
    with torch.no_grad():
        new.base_model.posenc.t5.weight.copy_(model.base_model.encoder.relative_attention_bias.weight)
    return new


def tokens(length: int, seed: int = 0) -> Tensor:
    """`[L]`, none of them special."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def padded(texts: list[Tensor], side: str, padding: int = 3) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, L]` of texts of several lengths."""
    width = max(map(len, texts))
    ids, mask = torch.full((len(texts), width), padding), torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        ids[row, place], mask[row, place] = text, 1
    return ids, mask
