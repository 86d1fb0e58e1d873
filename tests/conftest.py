"""Hosts and encodings of the matrix, and what every test runs under."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at once, on tiny tensors

import pytest
import torch
import transformers

import hf_posenc
from launcher import Launcher
from memory import poison_empty

ROOT = Path(__file__).parents[1]
LENGTH = 24
"""The hosts' own longest length."""

BERT = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
)
HOSTS = {
    "bert": ("Bert", BERT),
    "distilbert": ("DistilBert", dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=LENGTH)),
    **{
        name: (prefix, dict(BERT, max_position_embeddings=LENGTH + 2, pad_token_id=1, type_vocab_size=2))
        for name, prefix in {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}.items()
    },
    "electra": ("Electra", dict(BERT, embedding_size=16)),
    "albert": ("Albert", dict(BERT, embedding_size=16)),
    "mpnet": ("MPNet", dict(BERT, max_position_embeddings=LENGTH + 2, pad_token_id=1)),
    "ernie": ("Ernie", BERT),
    "data2vec-text": ("Data2VecText", dict(BERT, max_position_embeddings=LENGTH + 2, pad_token_id=1)),
    "megatron-bert": ("MegatronBert", BERT),
    "layoutlm": ("LayoutLM", dict(BERT, max_2d_position_embeddings=16)),
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, bos_token_id=1, eos_token_id=2, pad_token_id=0)),
}
"""Name -> prefix of its class names, and a tiny config."""
OFFSETS = dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text"), 2)
"""Hosts whose first token has another position id than 0."""
HEADS = dict.fromkeys(HOSTS, "ForMaskedLM") | {"gpt2": "LMHeadModel"}
ENCODINGS = ("alibi", "counter", "learned", "none", "normalized", "relative", "rope", "shaw", "sinusoidal", "t5")
VARIANTS = (*ENCODINGS, "relative_key_query", "learned+shaw", "sinusoidal+alibi")
"""The matrix: every encoding, and what is made of several."""
VOCABULARY = 61


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_empty(monkeypatch.setattr)


@pytest.fixture(scope="session")
def launch():
    """Runs scripts in processes of their own."""
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def library():
    """The texts of the standard library, without those of its own tests, which take longest to read."""
    from evaluation import corpus

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "LEFT_OUT", corpus.LEFT_OUT | {"test"})
        yield corpus.split()


def randomize(model, std=0.3, seed=0):
    """Draw all parameters anew, so that nothing stays at a start value which would hide a fault."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def randomize_encoding(model, seed=1):
    """Draw the encoding's own parameters from N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "posenc." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def stock(host, head="Model", seed=0, **changes):
    """A tiny random model of a host, in eval mode, with weights changed after init."""
    prefix, sizes = HOSTS[host]
    config = getattr(transformers, f"{prefix}Config")(**{"vocab_size": VOCABULARY, **sizes, **changes})
    torch.manual_seed(seed)
    return randomize(getattr(transformers, prefix + head)(config), seed=seed).eval()


def patched(host, encoding, head="Model", seed=0, max_length=None, **changes):
    """The same, patched, the encoding's parameters drawn from N(0, 1)."""
    return randomize_encoding(hf_posenc.patch(stock(host, head, seed, **changes), encoding, max_length=max_length))


def backends(model):
    """The attention implementations a model can run with here."""
    return ("eager", "sdpa") if model._supports_sdpa else ("eager",)


def tokens(batch=2, length=11, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def first(output):
    """The main tensor of a model's output: logits or hidden states."""
    return output[0]


def run_python(code, *arguments, timeout=300):
    """Run code in a new interpreter; its standard output. Fails with its standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
