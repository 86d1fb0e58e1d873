"""`torchrun --nproc-per-node 2` shards weights, one process offloads them: the same outputs and losses."""

import copy
import os

import torch
import torch.distributed as dist
from accelerate import cpu_offload
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import hf_posenc

SIZES = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
NAMES = {"alibi": {"slopes": "learned"}, "shaw": {"max_distance": 4}, "t5": {}, "rope+alibi": {"alibi__slopes": "learned"}}
IDS = torch.randint(5, 40, (2, 13), generator=torch.Generator().manual_seed(1))
INPUTS = {"input_ids": IDS, "attention_mask": (torch.arange(13) < torch.tensor([[13], [9]])).long()}


def models():
    """Each encoding in an encoder and in a decoder. Parameters are moved from where they start."""
    for name, options in NAMES.items():
        for make, config in ((BertForMaskedLM, BertConfig), (LlamaForCausalLM, LlamaConfig)):
            torch.manual_seed(0)
            model = hf_posenc.patch(make(config(**SIZES)), name, **options)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
            yield name, model.eval()


def logits(model):
    with torch.no_grad():
        return model(**INPUTS).logits


def results(model):
    """The outputs before and after three steps of training, and the losses of these steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = [logits(model)]
    for _ in range(3):
        loss = model(**INPUTS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, logits(model)]


if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    for name, plain in models():
        model = copy.deepcopy(plain)
        for layer in model.base_model.encoder.layer if "bert" in model.config.model_type else model.base_model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        torch.testing.assert_close(
            results(model), results(plain), rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    dist.destroy_process_group()
else:
    for name, plain in models():
        model = cpu_offload(copy.deepcopy(plain), execution_device="cpu", offload_buffers=True)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert torch.equal(logits(model), logits(plain)), name
