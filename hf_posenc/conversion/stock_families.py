"""Transformers encoders that differ from BERT only in their positions, and the paths of their corresponding modules.

A patched BERT with the encoding of such a family computes the same function as a model of that family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BERT_BODY = {
    "word": "embeddings.word_embeddings",
    "token_type": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "encoder.layer.{}.attention.self.query",
    "key": "encoder.layer.{}.attention.self.key",
    "value": "encoder.layer.{}.attention.self.value",
    "output": "encoder.layer.{}.attention.output.dense",
    "output_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "up": "encoder.layer.{}.intermediate.dense",
    "down": "encoder.layer.{}.output.dense",
    "down_norm": "encoder.layer.{}.output.LayerNorm",
    "pooler": "pooler.dense",
}
"""Part -> path in the base model. {} is the layer index."""
MPNET_BODY = {
    **{part: path for part, path in BERT_BODY.items() if part != "token_type"},
    "query": "encoder.layer.{}.attention.attn.q",
    "key": "encoder.layer.{}.attention.attn.k",
    "value": "encoder.layer.{}.attention.attn.v",
    "output": "encoder.layer.{}.attention.attn.o",
    "output_norm": "encoder.layer.{}.attention.LayerNorm",
}
JINA_BODY = {
    "word": "embeddings.word_embeddings",
    "token_type": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "layers.{}.self_attn.q_proj",
    "key": "layers.{}.self_attn.k_proj",
    "value": "layers.{}.self_attn.v_proj",
    "output": "layers.{}.self_attn.o_proj",
    "output_norm": "layers.{}.post_attention_layernorm",
    "up": "layers.{}.mlp.fc1",
    "down": "layers.{}.mlp.fc2",
    "down_norm": "layers.{}.post_mlp_layernorm",
    "pooler": "pooler.dense",
}
ROFORMER_BODY = {part: path for part, path in BERT_BODY.items() if part != "pooler"}

BERT_LM_HEAD = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "decoder": "cls.predictions.decoder",
}
ROBERTA_LM_HEAD = {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "decoder": "lm_head.decoder"}
ROBERTA_CLASSIFIER = {"dense": "classifier.dense", "out": "classifier.out_proj"}
TOKEN_HEADS = {"TokenClassification": {"out": "classifier"}, "QuestionAnswering": {"out": "qa_outputs"}}

Heads = Mapping[str, Mapping[str, str]]
"""Task -> part -> path in the whole model."""


@dataclass(frozen=True)
class Family:
    """The classes of one encoder family.

    prefix: prefix of its class names.
    base: attribute of the base model in models with a head.
    body, heads: paths of its modules.
    activations: task -> activation in its head, where "hidden_act" is the config's.
    """

    prefix: str
    base: str
    body: Mapping[str, str]
    heads: Heads
    activations: Mapping[str, str]

    def activation(self, task: str, config: Any) -> str | None:
        name = self.activations.get(task)
        return config.hidden_act if name == "hidden_act" else name


_ROBERTA_HEADS = {"MaskedLM": ROBERTA_LM_HEAD, "SequenceClassification": ROBERTA_CLASSIFIER, **TOKEN_HEADS}
_ROBERTA_ACTIVATIONS = {"MaskedLM": "gelu", "SequenceClassification": "tanh"}
BERT_LIKE = {
    "bert": Family(
        "Bert",
        "bert",
        BERT_BODY,
        {
            "MaskedLM": BERT_LM_HEAD,
            "SequenceClassification": {"dense": "bert.pooler.dense", "out": "classifier"},
            **TOKEN_HEADS,
        },
        {"MaskedLM": "hidden_act", "SequenceClassification": "tanh"},
    ),
    "electra": Family(
        "Electra",
        "electra",
        ROFORMER_BODY,
        {
            "MaskedLM": {
                "dense": "generator_predictions.dense",
                "norm": "generator_predictions.LayerNorm",
                "decoder": "generator_lm_head",
            },
            "SequenceClassification": ROBERTA_CLASSIFIER,
            **TOKEN_HEADS,
        },
        {"MaskedLM": "gelu", "SequenceClassification": "gelu"},
    ),
    **{
        kind: Family(prefix, "roberta", BERT_BODY, _ROBERTA_HEADS, _ROBERTA_ACTIVATIONS)
        for kind, prefix in {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}.items()
    },
}
"""Model type -> family, for the models that can be exported to another family."""


@dataclass(frozen=True)
class Target(Family):
    """The classes of an encoder family with another encoding.

    encoding: the encoding with which a patched BERT is equivalent to this family.
    unlike: function of its options that returns the reason why this family can't express them, or "".
    settings: function of options and number of tokens that returns arguments of its config.
    biases, sinusoids: paths of its position weights in the base model.
    """

    encoding: str = ""
    unlike: Callable[[Mapping[str, Any]], str] = lambda options: ""
    settings: Callable[[Mapping[str, Any], int], dict[str, Any]] = lambda options, length: {}
    biases: str | None = None
    sinusoids: str | None = None


def _mpnet_unlike(options: Mapping[str, Any]) -> str:
    if (options["num_buckets"], options["max_distance"]) != (32, 128):
        return "MPNet computes num_buckets=32 and max_distance=128, whatever its config says"
    return "MPNet shares one table of biases among its layers (per_layer=False)" if options["per_layer"] else ""


def _roformer_unlike(options: Mapping[str, Any]) -> str:
    given = {name: value for name, value in options.items() if name not in ("theta", "layout")}
    if options["layout"] != "interleaved":
        return "RoFormer rotates with layout='interleaved'"
    return "" if options["theta"] == 10000.0 and not given else "RoFormer rotates all features with theta=10000"


def _jina_unlike(options: Mapping[str, Any]) -> str:
    if options["layout"] != "half":
        return "JinaEmbeddingsV3 rotates with layout='half'"
    return "JinaEmbeddingsV3 rotates all features of a head" if "partial_rotary_factor" in options else ""


def rope_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` of a config for options of `rope`."""
    given = {name: value for name, value in options.items() if name not in ("theta", "layout")}
    return {"rope_type": "default", **given, "rope_theta": options["theta"]}


TARGETS = (
    Target(
        "JinaEmbeddingsV3",
        "roberta",
        JINA_BODY,
        _ROBERTA_HEADS,
        _ROBERTA_ACTIVATIONS,
        "rope",
        _jina_unlike,
        lambda options, length: {"rope_parameters": rope_parameters(options), "max_position_embeddings": length},
    ),
    Target(
        "RoFormer",
        "roformer",
        ROFORMER_BODY,
        {"MaskedLM": BERT_LM_HEAD, "SequenceClassification": ROBERTA_CLASSIFIER, **TOKEN_HEADS},
        {"MaskedLM": "hidden_act", "SequenceClassification": "hidden_act"},
        "rope",
        _roformer_unlike,
        lambda options, length: {"max_position_embeddings": length},
        sinusoids="encoder.embed_positions",
    ),
    Target(
        "MPNet",
        "mpnet",
        MPNET_BODY,
        _ROBERTA_HEADS,
        _ROBERTA_ACTIVATIONS,
        "t5",
        _mpnet_unlike,
        lambda options, length: {"relative_attention_num_buckets": 32, "max_position_embeddings": length + 2},
        "encoder.relative_attention_bias",
    ),
)
