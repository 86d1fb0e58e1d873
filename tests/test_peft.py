"""Patched models with PEFT: LoRA on top of them, merging, saving, and loading by Transformers."""

from importlib import metadata

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForSequenceClassification
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_posenc
from closeness import LOOSE, assert_apart, assert_close
from conftest import run_python
from models import first, patched, stock, tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


LORA = """
import sys, torch, hf_posenc
from transformers import AutoModelForSequenceClassification
from peft import PeftModel, AutoPeftModelForSequenceClassification
ids, expected = torch.load(sys.argv[3])
base = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=3)
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
auto = AutoPeftModelForSequenceClassification.from_pretrained(sys.argv[2], num_labels=3).eval()
with torch.no_grad():
    print(type(base).__name__, torch.equal(model(ids).logits, expected), torch.equal(auto(ids).logits, expected))
"""


@torch.no_grad()
def logits(model):
    # With gradients, a trained bias uses another kernel, which rounds differently.
    return first(model.eval()(tokens()))


def trained(lora):
    optimizer = torch.optim.SGD([p for p in lora.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        lora.train()(tokens(), labels=torch.tensor([0, 2])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return lora


def own_parameters(model):
    """The parameters of the encoding, without the kept original ones."""
    return {name: value for name, value in model.state_dict().items() if "posenc." in name and "posenc.original." not in name}


@pytest.mark.parametrize(("host", "encoding", "targets"), [("bert", "shaw", ["query", "value"]), ("mpnet", "rope", ["q", "v"])])
def test_lora(host, encoding, targets, tmp_path):
    """LoRA on a patched base works and reloads in a new process."""
    patched(host, encoding, "ForSequenceClassification", num_labels=3).save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    lora = get_peft_model(model, LoraConfig("SEQ_CLS", r=2, target_modules=targets, modules_to_save=["posenc"]))
    before, expected = logits(lora), logits(trained(lora))
    assert_apart(expected, before)
    lora.save_pretrained(tmp_path / "adapter")
    torch.save((tokens(), expected), tmp_path / "expected.pt")
    shown = run_python(LORA, tmp_path / "base", tmp_path / "adapter", tmp_path / "expected.pt").split()[-3:]
    assert shown[1:] == ["True", "True"] and shown[0].startswith("PosEnc")


@pytest.mark.parametrize(
    ("host", "encoding", "targets", "named"),
    [
        ("roberta", "learned+shaw", ["query", "value"], True),
        ("roberta", "learned+shaw", ["query", "value"], False),
        ("gpt2", "t5", ["c_attn"], True),
        ("mpnet", "learned", "all-linear", True),
    ],
)
def test_lora_trains_the_encoding_where_it_is_named(host, encoding, targets, named, tmp_path):
    base = patched(host, encoding, "ForSequenceClassification", num_labels=3)
    stock_logits, start = logits(base), {name: value.clone() for name, value in own_parameters(base).items()}
    config = LoraConfig("SEQ_CLS", r=2, target_modules=targets, modules_to_save=["posenc"] if named else None)
    lora = trained(get_peft_model(base, config))
    expected = logits(lora)
    with lora.disable_adapter():
        assert torch.equal(logits(lora), stock_logits)
    merged = lora.merge_and_unload()
    assert start and own_parameters(merged).keys() == start.keys()
    assert all(torch.equal(value, start[name]) != named for name, value in own_parameters(merged).items())
    merged.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(merged))
    assert_close(logits(again), expected, **LOOSE)
    assert type(hf_posenc.unpatch(merged)) is type(stock(host, "ForSequenceClassification"))


@pytest.mark.skipif(
    Version(metadata.version("peft")) < Version(MIN_PEFT_VERSION), reason=f"this Transformers needs PEFT {MIN_PEFT_VERSION}"
)
def test_adapters_by_transformers_itself(tmp_path):
    patched("bert", "relative", "ForSequenceClassification", num_labels=3).save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    model.add_adapter(LoraConfig("SEQ_CLS", r=2, target_modules=["query", "value"], modules_to_save=["posenc"]))
    expected = logits(trained(model))
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=3)
    assert type(again) is hf_posenc.PosEncBertForSequenceClassification and torch.equal(logits(again), expected)
    with pytest.raises(ValueError, match="patch first"):
        hf_posenc.unpatch(model)


def test_patch_comes_before_peft():
    wrapped = get_peft_model(stock("bert"), LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="patch first"):
        hf_posenc.patch(wrapped, "alibi")


@pytest.mark.parametrize("encoding", ["sinusoidal+rope+alibi+shaw", "t5"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_prefix_tuning(encoding, side):
    """The prefix consists of keys without tokens, before padding. Each row gives the same output as it does alone."""
    model = patched("gpt2", encoding, "LMHeadModel")
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = get_peft_model(model, config).eval()
    for parameter in tuned.prompt_encoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    mask = torch.ones(2, 9, dtype=torch.long)
    real = slice(4, 9) if side == "left" else slice(0, 5)
    mask[0] = 0
    mask[0, real] = 1
    both = tuned(input_ids=tokens(2, 9), attention_mask=mask).logits
    assert_close(both[:1, real], tuned(input_ids=tokens(2, 9)[:1, real], attention_mask=mask[:1, real]).logits)
    assert_close(both[1:], tuned(input_ids=tokens(2, 9)[1:], attention_mask=mask[1:]).logits)
    if side == "left":
        settings = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        made = tuned.generate(input_ids=tokens(2, 9), attention_mask=mask, **settings)
        alone = tuned.generate(input_ids=tokens(2, 9)[:1, real], attention_mask=mask[:1, real], **settings)
        assert torch.equal(made[0, 9:], alone[0, 5:])
