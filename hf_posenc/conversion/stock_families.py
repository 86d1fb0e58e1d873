"""Transformers encoders that differ from BERT only in their positions, and the paths of their corresponding modules.

A patched BERT with the encoding of such a family computes the same function as a model of that family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
DISTILBERT_BODY = {
    "word": "embeddings.word_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "transformer.layer.{}.attention.q_lin",
    "key": "transformer.layer.{}.attention.k_lin",
    "value": "transformer.layer.{}.attention.v_lin",
    "output": "transformer.layer.{}.attention.out_lin",
    "output_norm": "transformer.layer.{}.sa_layer_norm",
    "up": "transformer.layer.{}.ffn.lin1",
    "down": "transformer.layer.{}.ffn.lin2",
    "down_norm": "transformer.layer.{}.output_layer_norm",
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
    activations: task -> activation in its head. A name that ends with "_act" or "activation" is a field of the config.
    settings_of: function of its config that returns arguments of a target's config whose names or values differ.
    unlike_bert: function of its config that returns the reason why the model has other parts than BERT, or "".
    """

    prefix: str
    base: str
    body: Mapping[str, str]
    heads: Heads
    activations: Mapping[str, str]
    settings_of: Callable[[Any], dict[str, Any]] = lambda config: {}
    unlike_bert: Callable[[Any], str] = lambda config: ""

    def activation(self, task: str, fields: Mapping[str, Any]) -> str | None:
        """The activation in the head of a task, by the fields of a config."""
        name = self.activations.get(task)
        return fields[name] if name is not None and name.endswith(("_act", "activation")) else name


def _pooled(base: str) -> dict[str, str]:
    """The head of a classifier behind the pooler of a base model."""
    return {"dense": f"{base}.pooler.dense", "out": "classifier"}


SUMMARY = {"dense": "sequence_summary.summary", "out": "classifier"}
_ROBERTA_HEADS = {"MaskedLM": ROBERTA_LM_HEAD, "SequenceClassification": ROBERTA_CLASSIFIER, **TOKEN_HEADS}
_ROBERTA_ACTIVATIONS = {"MaskedLM": "gelu", "SequenceClassification": "tanh", "MultipleChoice": "tanh"}
_BERT_ACTIVATIONS = {"MaskedLM": "hidden_act", "SequenceClassification": "tanh", "MultipleChoice": "tanh"}


def _like_bert(prefix: str, base: str, unlike: Callable[[Any], str] = lambda config: "") -> Family:
    heads = {"MaskedLM": BERT_LM_HEAD, "SequenceClassification": _pooled(base), "MultipleChoice": _pooled(base), **TOKEN_HEADS}
    return Family(prefix, base, BERT_BODY, heads, _BERT_ACTIVATIONS, unlike_bert=unlike)


def _like_roberta(prefix: str, base: str, body: Mapping[str, str] = BERT_BODY) -> Family:
    return Family(prefix, base, body, {**_ROBERTA_HEADS, "MultipleChoice": _pooled(base)}, _ROBERTA_ACTIVATIONS)


def _of_distilbert(config: Any) -> dict[str, Any]:
    return {
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.hidden_dim,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": 1e-12,
    }


def _ernie_unlike(config: Any) -> str:
    return "Ernie has task types with use_task_id=True" if config.use_task_id else ""


BERT_LIKE = {
    "bert": _like_bert("Bert", "bert"),
    "ernie": _like_bert("Ernie", "ernie", _ernie_unlike),
    "distilbert": Family(
        "DistilBert",
        "distilbert",
        DISTILBERT_BODY,
        {
            "MaskedLM": {"dense": "vocab_transform", "norm": "vocab_layer_norm", "decoder": "vocab_projector"},
            "SequenceClassification": {"dense": "pre_classifier", "out": "classifier"},
            "MultipleChoice": {"dense": "pre_classifier", "out": "classifier"},
            **TOKEN_HEADS,
        },
        {"MaskedLM": "activation", "SequenceClassification": "relu", "MultipleChoice": "relu"},
        settings_of=_of_distilbert,
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
            "MultipleChoice": SUMMARY,
            **TOKEN_HEADS,
        },
        {"MaskedLM": "gelu", "SequenceClassification": "gelu", "MultipleChoice": "summary_activation"},
    ),
    "mpnet": _like_roberta("MPNet", "mpnet", MPNET_BODY),
    "data2vec-text": _like_roberta("Data2VecText", "data2vec_text"),
    **{
        kind: _like_roberta(prefix, "roberta")
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
    chosen_activations: task -> function of the activation in its head that returns the config fields that set it.
    """

    encoding: str = ""
    unlike: Callable[[Mapping[str, Any]], str] = lambda options: ""
    settings: Callable[[Mapping[str, Any], int], dict[str, Any]] = lambda options, length: {}
    biases: str | None = None
    sinusoids: str | None = None
    chosen_activations: Mapping[str, Callable[[str | None], dict[str, Any]]] = field(default_factory=dict)


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
    if options.get("rope_type") == "dynamic":
        return "JinaEmbeddingsV3 has one length for its limit and for the start of dynamic scaling"
    return "JinaEmbeddingsV3 rotates all features of a head" if "partial_rotary_factor" in options else ""


def _summary(activation: str | None) -> dict[str, Any]:
    """Fields of a config by which the head reads the first token through a projection and an activation."""
    return {"summary_type": "first", "summary_use_proj": True, "summary_activation": activation}


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
        encoding="rope",
        unlike=_jina_unlike,
        settings=lambda options, length: {"rope_parameters": rope_parameters(options), "max_position_embeddings": length},
    ),
    Target(
        "RoFormer",
        "roformer",
        ROFORMER_BODY,
        {
            "MaskedLM": BERT_LM_HEAD,
            "SequenceClassification": ROBERTA_CLASSIFIER,
            "MultipleChoice": SUMMARY,
            **TOKEN_HEADS,
        },
        {"MaskedLM": "hidden_act", "SequenceClassification": "hidden_act"},
        encoding="rope",
        unlike=_roformer_unlike,
        settings=lambda options, length: {"max_position_embeddings": length},
        sinusoids="encoder.embed_positions",
        chosen_activations={"MultipleChoice": _summary},
    ),
    Target(
        "MPNet",
        "mpnet",
        MPNET_BODY,
        {**_ROBERTA_HEADS, "MultipleChoice": _pooled("mpnet")},
        _ROBERTA_ACTIVATIONS,
        encoding="t5",
        unlike=_mpnet_unlike,
        settings=lambda options, length: {"relative_attention_num_buckets": 32, "max_position_embeddings": length + 2},
        biases="encoder.relative_attention_bias",
    ),
)
