"""A decoder of x-transformers with the encodings of hf-posenc."""

from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from x_transformers import Decoder, TransformerWrapper
from x_transformers.x_transformers import Attention

import hf_posenc


class XTransformerConfig(PreTrainedConfig):
    model_type = "x-transformer"
    vocab_size: int = 61
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_hidden_layers: int = 2
    max_position_embeddings: int = 24


class XTransformer(PreTrainedModel):
    config_class = XTransformerConfig

    def __init__(self, config):
        super().__init__(config)
        layers = Decoder(
            dim=config.hidden_size,
            depth=config.num_hidden_layers,
            heads=config.num_attention_heads,
            attn_dim_head=config.hidden_size // config.num_attention_heads,
        )
        self.inner = TransformerWrapper(
            num_tokens=config.vocab_size, max_seq_len=config.max_position_embeddings, attn_layers=layers
        )
        self.post_init()

    def get_input_embeddings(self):
        return self.inner.token_emb.emb

    def forward(self, input_ids, attention_mask=None):
        mask = None if attention_mask is None else attention_mask.bool()
        return BaseModelOutput(self.inner(input_ids, mask=mask, return_embeddings=True))


AutoConfig.register("x-transformer", XTransformerConfig)
AutoModel.register(XTransformerConfig, XTransformer)
hf_posenc.register_attention(Attention, is_causal=True)
hf_posenc.register_positions(XTransformer, "inner.pos_emb.emb")
