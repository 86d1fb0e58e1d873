"""Applies rotations and score biases in attention functions."""

from hf_posenc.attention import known_models  # noqa: F401 registers the attentions of Transformers that have rows
