"""A decoder in the style of nanoGPT with the encodings of hf-posenc."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import hf_posenc


class NanoGPTConfig(PreTrainedConfig):
    model_type = "nanogpt"
    attribute_map = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "max_position_embeddings": "block_size"}
    vocab_size: int = 61
    n_embd: int = 32
    n_head: int = 4
    n_layer: int = 2
    block_size: int = 24


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.c_attn = config.n_head, nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        return self.c_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(config.n_embd), CausalSelfAttention(config), nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(PreTrainedModel):
    config_class = NanoGPTConfig

    def __init__(self, config):
        super().__init__(config)
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.block_size, config.n_embd)
        self.h, self.ln_f = nn.ModuleList([Block(config) for _ in range(config.n_layer)]), nn.LayerNorm(config.n_embd)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def forward(self, input_ids):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        return BaseModelOutput(self.ln_f(x))


AutoConfig.register("nanogpt", NanoGPTConfig)
AutoModel.register(NanoGPTConfig, NanoGPT)
hf_posenc.register_attention(CausalSelfAttention, is_causal=True)
