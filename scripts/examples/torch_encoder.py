"""torch.nn.TransformerEncoder with the encodings of hf-posenc."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import hf_posenc


class TorchEncoderConfig(PreTrainedConfig):
    model_type = "torch-encoder"
    vocab_size: int = 61
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_hidden_layers: int = 2
    max_position_embeddings: int = 24


class TorchEncoder(PreTrainedModel):
    config_class = TorchEncoderConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        sizes = config.hidden_size, config.num_attention_heads, 4 * config.hidden_size
        layer = nn.TransformerEncoderLayer(*sizes, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, enable_nested_tensor=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        states = self.embed_tokens(input_ids) + self.position_embeddings(position_ids)
        padding = None if attention_mask is None else attention_mask == 0
        return BaseModelOutput(self.encoder(states, src_key_padding_mask=padding))


AutoConfig.register("torch-encoder", TorchEncoderConfig)
AutoModel.register(TorchEncoderConfig, TorchEncoder)
hf_posenc.register_attention(nn.MultiheadAttention)
