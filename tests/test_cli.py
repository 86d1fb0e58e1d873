"""The commands that save a model, `list`, and `inspect`: they wrap the API, report errors in one line, and save completely."""

import functools
import json
import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertTokenizer, RobertaForMaskedLM
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from typer.testing import CliRunner

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc.cli import Group, app
from models import ENCODINGS, LENGTH, first, patched, slow, stock, tokens

SENTENCES = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
"""For tests that load a SentenceTransformer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directories of an original BERT with its tokenizer, an original RoBERTa without one, and a patched BERT."""
    path = tmp_path_factory.mktemp("models")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    stock("bert", "ForMaskedLM").save_pretrained(path / "bert")
    BertTokenizer(str(path / "vocab.txt"), model_max_length=LENGTH).save_pretrained(path / "bert")
    stock("roberta", "ForMaskedLM").save_pretrained(path / "roberta")
    patched("bert", "alibi").save_pretrained(path / "patched")
    return path


@pytest.fixture(scope="module")
def sentences(folders, tmp_path_factory):
    """A SentenceTransformer with modules that aren't the default, and a prompt."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    path = tmp_path_factory.mktemp("sentences") / "stock"
    body = Transformer(str(folders / "bert"))
    modules = [body, Pooling(body.get_embedding_dimension(), "cls"), Normalize()]
    made = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "a b "}, similarity_fn_name="dot")
    made.save_pretrained(str(path), create_model_card=False)
    return path


def maximum_length(report):
    """The maximum length in a printed report of `inspect`."""
    return re.search(r"maximum length: +(.*)", report)[1].strip()


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    assert isinstance(done.exception, SystemExit | None)
    return done.stdout if code == 0 else done.stderr


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Reading models.


def test_list():
    listed = json.loads(run("list", "--json"))
    assert [name for name in listed if name in ENCODINGS] == list(ENCODINGS)
    for name, kind in hf_posenc.list_encodings().items():
        row = listed[name]
        assert row["aliases"] == kind.aliases and tuple(row["mechanisms"]) == kind.mechanisms()
        assert {option: said["default"] for option, said in row["options"].items()} == {
            option: getattr(kind, option) for option in kind.option_types()
        }
    assert all(bool(listed[name]["papers"]) == (name not in ("counter", "normalized")) for name in ENCODINGS)
    t5 = listed["t5"]
    assert t5.pop("options")["num_buckets"] == {"default": 32, "allowed": "an integer above 0"}
    assert t5 == {
        "title": "T5's relative position bias",
        "aliases": {},
        "mechanisms": ["distance_bias"],
        "learned": "yes",
        "relative": True,
        "any_length": "yes",
        "stacks": "all",
        "parameters": 32 * 12,
        "per_layer": False,
        "papers": ["https://arxiv.org/abs/1910.10683"],
    }
    assert (listed["learned"]["any_length"], listed["normalized"]["any_length"]) == ("no", "in encoders")
    assert listed["alibi"]["learned"] == "slopes='learned'" and listed["rope"]["learned"] == "no"
    assert listed["shaw"]["per_layer"] and listed["shaw"]["parameters"] == 257 * 64
    assert "--json and --markdown" in run("list", "--json", "--markdown", code=1)


def test_the_page_of_encodings_is_fresh():
    """The table in docs/reference/encodings.md is up to date. After a change to a class, run hf-posenc list --markdown."""
    page = (ROOT / "docs" / "reference" / "encodings.md").read_text()
    before, _, rest = page.partition("<!-- hf-posenc list --markdown -->\n")
    table, _, behind = rest.partition("<!-- end -->")
    assert before and behind and table == run("list", "--markdown")


def test_list_shows_all_of_it():
    """In 80 columns, as in a pipe, `list` wraps its text and cuts nothing."""
    shown = run("list")
    words = re.sub(r"[\s│]+", " ", shown)
    for name, row in json.loads(run("list", "--json")).items():
        assert all(word in words for word in (name, *row["aliases"], *row["mechanisms"], *row["papers"]))
        assert all(f"{option} = {said['default']!r}" in words for option, said in row["options"].items())
    assert "terms='keys+queries'" in shown and not re.search(r"…|\[/", shown) and max(map(len, shown.splitlines())) <= 80


def test_inspect(folders, tmp_path):
    for name, length in (("bert", f"{LENGTH} tokens"), ("roberta", f"{LENGTH} tokens"), ("patched", "no limit")):
        report = asdict(hf_posenc.inspect(folders / name))
        assert json.loads(run("inspect", folders / name, "--json")) == json.loads(json.dumps(report))
        assert maximum_length(run("inspect", folders / name)) == length
    config = json.loads((folders / "bert" / "config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "ignored: position_embedding_type='relative_key'" in run("inspect", tmp_path)
    assert f"{tmp_path}/[b]nowhere" in run("inspect", tmp_path / "[b]nowhere", code=1)  # a path isn't markup


# Saving models.


def test_patch_saves_the_model_with_its_head_and_tokenizer(folders, tmp_path):
    new = tmp_path / "deep" / "new"
    shown = run(
        *("patch", folders / "bert", "sinusoidal+rotary", "--option", "sinusoidal__base=500", "--option"),
        *("rope__layout=interleaved", "--max-length", 40, "--inject", "every_layer", "--output-dir", new),
    )
    assert maximum_length(shown) == "40 tokens" and "distil" in shown
    expected = hf_posenc.patch(
        AutoModelForMaskedLM.from_pretrained(folders / "bert"),
        {"type": "sinusoidal+rope", "sinusoidal": {"base": 500.0}, "rope": {"layout": "interleaved"}},
        max_length=40,
        inject="every_layer",
    )
    kind, logits, length = loaded(new)
    assert (kind, length) == ("PosEncBertForMaskedLM", 40) and torch.equal(logits, first(expected(tokens())))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]
    assert not [path for path in new.iterdir() if path.is_dir()]


def loaded(folder):
    """The class of a saved model, its logits, and its tokenizer's maximum length."""
    model = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer_config.json").exists() else None
    return type(model).__name__, first(model(tokens())), tokenizer and tokenizer.model_max_length


def test_patch_without_a_limit_or_a_tokenizer(folders, tmp_path):
    run("patch", folders / "bert", '{"type": "alibi"}', "--output-dir", tmp_path / "bert")
    saved = json.loads((tmp_path / "bert" / "tokenizer_config.json").read_text())
    assert saved["model_max_length"] == VERY_LARGE_INTEGER == AutoTokenizer.from_pretrained(tmp_path / "bert").model_max_length
    assert "no tokenizer" in run("patch", folders / "roberta", "t5", "--no-keep-original", "--output-dir", tmp_path / "roberta")
    model = hf_posenc.PosEncRobertaForMaskedLM.from_pretrained(tmp_path / "roberta")
    assert isinstance(model, RobertaForMaskedLM) and not model.config.position_encoding["original"]["kept"]
    # If a model has no tokenizer config, as in older models, the vocabulary counts.
    shutil.copytree(folders / "bert", tmp_path / "old", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copy(folders / "vocab.txt", tmp_path / "old")
    assert "no tokenizer" not in run("patch", tmp_path / "old", "learned", "--output-dir", tmp_path / "new")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.model_max_length == LENGTH and tokenizer("a b").input_ids == [2, 5, 6, 3]


@SENTENCES
def test_modules_of_sentence_transformers_stay(folders, sentences, tmp_path):
    """All commands that save a model keep the modules, and so do other classes of sentence-transformers."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    shown = run("patch", sentences, "relative", "--max-length", 16, "--output-dir", tmp_path / "new")
    assert "not saved" not in shown and "no tokenizer" not in shown
    run("extend", tmp_path / "new", "--no-limit", "--output-dir", tmp_path / "longer")
    run("unpatch", tmp_path / "longer", "--output-dir", tmp_path / "back")
    paths = (sentences, *(tmp_path / name for name in ("new", "longer", "back")))
    before, after, longer, back = models = [SentenceTransformer(str(path), device="cpu") for path in paths]
    assert len({str(list(model)[1:]) for model in models}) == 1 and type(after[0].model).__name__ == "PosEncBertModel"
    assert (after.prompts["query"], after.similarity_fn_name) == ("a b ", "dot")
    assert (after.max_seq_length, longer.max_seq_length) == (16, VERY_LARGE_INTEGER)
    assert (before.encode(["a b a"]) == back.encode(["a b a"])).all()
    expected = hf_posenc.patch(before, "relative", max_length=16)
    expected[0].model.load_state_dict(after[0].model.state_dict())  # biases are drawn at random
    assert (after.encode(["a b a"]) == expected.encode(["a b a"])).all()

    CrossEncoder(str(folders / "bert"), device="cpu").save_pretrained(str(tmp_path / "old"), create_model_card=False)
    shown = run("patch", tmp_path / "old", "alibi", "--output-dir", tmp_path / "cross")
    found = CrossEncoder(str(tmp_path / "cross"), device="cpu")
    assert type(found[0].model).__name__ == "PosEncBertForSequenceClassification" and "distil" not in shown
    (tmp_path / "old" / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "Tagger"}))
    error = run("patch", tmp_path / "old", "alibi", "--output-dir", tmp_path / "newer", code=1)
    assert "model_type 'Tagger'. Allowed: SentenceTransformer, CrossEncoder" in error


@pytest.mark.parametrize(
    ("command", "place"),
    [(command, "the first module") for command in ("patch", "eval", "distill.py")]
    + [("patch", "another module"), ("patch", "a module of a router"), ("patch", "a router without an end")],
)
def test_code_of_a_sentence_transformer_is_not_run(sentences, launch, tmp_path, command, place):
    """No code of a checkpoint runs. sentence-transformers 5 runs code in local directories without trust_remote_code. Version 6
    raises an error with advice that doesn't apply to the command line.
    """
    model, ran = shutil.copytree(sentences, tmp_path / "model"), tmp_path / "ran"
    (model / "stranger.py").write_text(f"open({str(ran)!r}, 'w')\nfrom torch.nn import Identity as Custom\n")
    modules = json.loads((model / "modules.json").read_text())
    if "router" in place:
        (model / "2_Normalize").mkdir(exist_ok=True)
        modules[2]["type"] = "sentence_transformers.base.modules.router.Router"
        types = {".": modules[2]["type"]} if "end" in place else {"query_0": "stranger.Custom"}
        router = {"types": types, "structure": {"query": ["query_0"]}, "parameters": {}}
        (model / "2_Normalize" / "router_config.json").write_text(json.dumps(router))
    else:
        modules[place == "another module"]["type"] = "stranger.Custom"
    (model / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "texts.txt").write_text("a b\n" * 40)
    new, texts = ("--output-dir", tmp_path / "new"), ("--texts", tmp_path / "texts.txt")
    if command == "distill.py":
        arguments = ("--model_name_or_path", model, "--position_encoding", "alibi", "--output_dir", tmp_path / "new")
        codes, error = launch("distill", *arguments, "--train_file", tmp_path / "texts.txt", "--max_train_steps", 1)
        assert codes != [0]
    else:
        error = run(command, model, *{"patch": ("alibi", *new), "eval": texts}[command], code=1)
    refusal = "a module of class 'stranger.Custom', which isn't part of sentence-transformers, so it was not loaded"
    assert ("lists more than 1000 modules" if "end" in place else refusal) in error
    assert not ran.exists() and not (tmp_path / "new").exists()


def test_without_sentence_transformers_its_modules_are_not_dropped_silently(sentences, tmp_path, monkeypatch):
    from hf_posenc.training import sentences as training

    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(SystemExit, match=f"{sentences}.*pip install sentence-transformers"):
        training.load(str(sentences))
    said = run("patch", sentences, "alibi", "--output-dir", tmp_path / "new")
    assert "not saved" in said and "pip install sentence-transformers" in said
    assert (tmp_path / "new" / "config.json").exists() and not (tmp_path / "new" / "modules.json").exists()


@pytest.mark.parametrize("kind", ["sentences", slow("older sentences"), "plain"])
def test_the_command_that_patch_prints_works(folders, sentences, launch, tmp_path, kind):
    original = folders / "bert" if kind == "plain" else shutil.copytree(sentences, tmp_path / "original")
    if kind == "older sentences":  # whose Transformers model has its own directory
        (original / "0_Transformer").mkdir()
        for file in {*original.glob("*token*"), *original.glob("*.txt"), *original.glob("model*"), original / "config.json"}:
            file.rename(original / "0_Transformer" / file.name)
        (original / "sentence_bert_config.json").rename(original / "0_Transformer" / "sentence_bert_config.json")
        listed = json.loads((original / "modules.json").read_text())
        (original / "modules.json").write_text(json.dumps([{**listed[0], "path": "0_Transformer"}, *listed[1:]]))
    shown = run("patch", original, "alibi", "--output-dir", tmp_path / "a new one")
    python, flag, module, *given = shlex.split(shown.splitlines()[-1])
    assert (python, flag, module) == ("python", "-m", "hf_posenc.training.distill")
    (tmp_path / "texts.txt").write_text("a b\nb a b\n" * 9)
    few = ["--train_file", tmp_path / "texts.txt", "--max_train_steps", 2, "--min_text_length", 3, "--text_length", 8]
    codes, said = launch("distill", *given, *few)
    assert codes == [0], said
    assert (tmp_path / "a new one-distilled" / "modules.json").exists() == (kind != "plain")


@pytest.mark.parametrize(
    ("given", "keyword", "value"),
    [
        ((), "layers", None),
        (("--layers", "3::4"), "layers", "3::4"),
        (("--layers", "[0, 2]"), "layers", [0, 2]),
        (("--option", "rope__layers=0::2"), "layers", None),
        (("--where", "encoder"), "where", "encoder"),
        (("--where", '["encoder", "cross"]'), "where", ["encoder", "cross"]),
        (("--where", '{"cross": "rope"}'), "where", {"cross": "rope"}),
    ],
)
def test_patch_hands_on_what_is_given(folders, tmp_path, monkeypatch, given, keyword, value):
    def patch(model, encoding, **keywords):
        raise ValueError(json.dumps(keywords.get(keyword)))

    monkeypatch.setattr(hf_posenc, "patch", patch)
    error = run("patch", folders / "bert", "rope+alibi", *given, "--output-dir", tmp_path / "new", code=1)
    assert json.loads(error.partition("Error: ")[2]) == value


def test_code_elsewhere_is_not_named_by_the_copy(folders, tmp_path, caplog):
    """Neither the tokenizer nor the config names the code if the model has no encoding and uses classes of Transformers."""
    shutil.copytree(folders / "bert", tmp_path / "model")
    tokenizers, models = {"AutoTokenizer": ["someone/else--code.Odd", None]}, {"AutoModel": "someone/else--code.Model"}
    for name, code in (("tokenizer_config.json", tokenizers), ("config.json", models)):
        values = json.loads((tmp_path / "model" / name).read_text())
        (tmp_path / "model" / name).write_text(json.dumps({**values, "auto_map": code}))
    for line in (("patch", "alibi"), ("extend", "--max-length", 48, "--method", "linear")):
        caplog.clear()
        run(line[0], tmp_path / "model", *line[1:], "--output-dir", tmp_path / line[0])
        assert not [file for file in (tmp_path / line[0]).iterdir() if b"someone" in file.read_bytes()]
        assert "The tokenizer's auto_map refers to code that isn't saved with it (someone/else--code.Odd)" in caplog.text
        assert ("The config's auto_map refers to" in caplog.text) == (line[0] == "extend")
    assert AutoTokenizer.from_pretrained(tmp_path / "patch")("a b").input_ids == [2, 5, 6, 3]


@SENTENCES
def test_code_elsewhere_is_not_named_by_modules(sentences, tmp_path, caplog):
    """A module of sentence-transformers doesn't name the code. Its processor is the tokenizer."""
    from sentence_transformers import SentenceTransformer

    outer = SentenceTransformer(str(sentences), device="cpu")
    outer.tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["someone/else--code.Odd", None]}
    hf_posenc.patch(outer, "alibi").save_pretrained(str(tmp_path), create_model_card=False)
    assert not [file for file in tmp_path.rglob("*.json") if "someone" in file.read_text()]
    assert "(someone/else--code.Odd)" in caplog.text and "auto_map" in outer.tokenizer.init_kwargs


def test_extend_and_unpatch(folders, tmp_path):
    run("patch", folders / "bert", "relative", "--max-length", 30, "--output-dir", tmp_path / "new")
    shown = run("extend", tmp_path / "new", "--max-length", 40, "--output-dir", tmp_path / "longer")
    assert maximum_length(shown) == "40 tokens" and f"Saved to {tmp_path / 'longer'}" in shown and "distil" not in shown
    run("extend", tmp_path / "new", "--no-limit", "--output-dir", tmp_path / "new", "--overwrite")
    assert maximum_length(run("unpatch", tmp_path / "longer", "--output-dir", tmp_path / "back")) == "24 tokens"
    _, logits, length = loaded(tmp_path / "longer")
    _, without_limit, no_length = loaded(tmp_path / "new")
    assert length == 40 and no_length == VERY_LARGE_INTEGER and torch.equal(logits, without_limit)
    kind, logits, length = loaded(tmp_path / "back")
    assert kind == "BertForMaskedLM" and length == LENGTH and torch.equal(logits, loaded(folders / "bert")[1])
    assert not list((tmp_path / "back").glob("*.py"))


def test_unpatch_says_what_it_gives(tmp_path):
    """`unpatch` describes its result for a model without its original positions, and for one without a tokenizer."""
    patched("bert", "alibi", "ForMaskedLM").save_pretrained(tmp_path / "patched")
    shown = run("unpatch", tmp_path / "patched", "--output-dir", tmp_path / "back")
    assert "no tokenizer" in shown
    hf_posenc.patch(stock("bert"), "alibi", keep_original=False).save_pretrained(tmp_path / "bare")
    for name, words in (("bare", "positions were not kept"), ("back", "isn't patched")):
        assert words in run("unpatch", tmp_path / name, "--output-dir", tmp_path / "new", code=1)
    assert not (tmp_path / "new").exists()


# Errors. tests/test_commands.py tests invalid arguments.


@pytest.mark.parametrize(
    ("line", "name"),
    [
        *(("inspect", name) for name in ("./nothing", "/nothing", "a file", "a link")),
        ("inspect", "nothing/of/this/name"),
        ("patch {} alibi --output-dir new", "nothing/of/this/name"),
        ("convert {} alibi --texts my.txt --output-dir new", "nothing/of/this/name"),
        ("unpatch {} --output-dir new", "a file"),
        ("extend {} --no-limit --output-dir new", "nothing/of/this/name"),
        ("eval {} --texts my.txt", "nothing/of/this/name"),
        ("bench", "./nothing"),
        ("push {} me/x", "a file"),
        ("push {} me/x", "nothing/of/this/name"),
        ("plot attention {} --texts my.txt --output new.png", "nothing/of/this/name"),
    ],
)
def test_a_directory_that_does_not_exist(tmp_path, monkeypatch, line, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("a b\n" * 30)
    os.mkfifo("a file")
    os.symlink("nothing", "a link")
    words = "isn't a directory" if name == "a file" else f"The directory '{name.removeprefix('./')}' doesn't exist"
    line = line if "{}" in line else line + " {}"
    error = " ".join(run(*shlex.split(line.format(f"'{name}'")), code=1).split()).replace("'./", "'")
    assert f"{words}. Pass the directory of a saved model, or its ID on the Hub" in error
    assert "Repo id" not in error and not os.path.exists("new")


def config(**changes):
    return json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], **changes}).encode()


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def of_other_shapes(path):
    save_file({key: value[:-1] for key, value in load_file(path).items()}, path, {"format": "pt"})


def emptied(path):
    path.unlink()
    path.mkdir()


HOSTILE = {
    "nested lists": b"[" * 100_000,
    "a list": b"[]",
    "no UTF-8": b"\xff\xfe\x00\x9c",
    "nested objects": b'{"a":' * 100_000,
    "a number": b"3",
    "nothing": b"",
    "a byte order mark and half an object": b"\xef\xbb\xbf{",
    "an endless integer": b'{"model_type": ' + b"9" * 5_000 + b"}",
    "a directory": emptied,
}
"""The content of a JSON file, or a change to it."""
CONFIGS = {
    "nested within limits of Python": config(a=functools.reduce(lambda inner, _: {"a": inner}, range(300), {})),
    "a text for a size": config(hidden_size="x"),
    "NaN for a size": config(hidden_size=math.nan),
    "infinity for a size": config(hidden_size=math.inf),
    "no heads": config(num_attention_heads=0),
    "a negative vocabulary": config(vocab_size=-3),
    "an unknown model type": config(model_type=["bert"]),
    "names that are none": config(architectures=3),
}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(pytest.param("config.json", content, id=f"config.json: {name}") for name, content in {**HOSTILE, **CONFIGS}.items()),
        *(
            pytest.param(file, HOSTILE[name], id=f"{file}: {name}")
            for file in ("tokenizer.json", "model.safetensors.index.json")
            for name in [*HOSTILE][:3]
        ),
        *(("modules.json", HOSTILE["nested lists"]), ("config_sentence_transformers.json", b"[]")),
        *(("pytorch_model.bin", content) for content in (b"", b"\x80\x02garbage", b"PK\x03\x04", emptied)),
        *(("model.safetensors", content) for content in (b"", b"\xff" * 99, emptied, cut_off, of_other_shapes, os.remove)),
        ("model.safetensors", (9_000).to_bytes(8, "little") + b"[" * 9_000),
    ],
)
def test_files_that_no_library_reads(folders, tmp_path, file, content):
    """Every file of a model that can't be read gives an error in one line."""
    model, new = shutil.copytree(folders / "bert", tmp_path / "model"), tmp_path / "new"
    if file in ("pytorch_model.bin", "model.safetensors.index.json"):
        (model / "model.safetensors").unlink()
    if file == "config_sentence_transformers.json":
        (model / "modules.json").write_text("[]")
    if callable(content):
        (model / file).touch()
        content(model / file)
    else:
        (model / file).write_bytes(content)
    lines = [("patch", model, "alibi", "--output-dir", new, "--json")]
    lines += {"config.json": [("inspect", model)], "model.safetensors": [("push", model, "me/x")]}.get(file, [])
    for line in lines:
        error = run(*line, code=1)
        said = error.strip().splitlines()[-1]
        assert re.match(r"Error: .*model", said) and "Traceback" not in error and "weights_only" not in error
        assert 40 < len(said) < 900 and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_pipe_among_the_files_of_a_model(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "config.json isn't a regular file. Remove it" in run("inspect", tmp_path, code=1)


# Existing output directories.


def test_patch_keeps_what_is_there(folders, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for arguments, words in ((), "isn't empty"), (("--overwrite",), "contains no model"):
        assert words in run("patch", folders / "bert", "alibi", "--output-dir", tmp_path, *arguments, code=1)
    assert "is a file" in run("patch", folders / "bert", "alibi", "--output-dir", notes, "--overwrite", code=1)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_patch_overwrites_a_model(folders, tmp_path):
    """`patch` overwrites another model, and then itself. The original can't be named as the teacher then, so it must be
    restored.
    """
    new = tmp_path / "new"
    new.mkdir()
    folder = new.stat().st_ino
    run("patch", folders / "bert", "alibi", "--output-dir", new)
    (new / "checkpoint-1").mkdir()
    (new / "notes").symlink_to(folders)
    run("patch", folders / "roberta", "rope", "--output-dir", new, "--overwrite")
    assert hf_posenc.inspect(new).encoding == "rope" and (folders / "vocab.txt").exists()
    names = {path.name for path in new.iterdir()}
    kept = {"checkpoint-1", "notes"}
    assert {name for name in names if not name.endswith(".py")} == {"config.json", "model.safetensors"} | kept
    assert "posenc_encodings_rope.py" in names and "posenc_encodings_alibi.py" not in names and new.stat().st_ino == folder

    same = str(shutil.copytree(folders / "roberta", tmp_path / "same"))
    assert "isn't empty" in run("patch", same, "rope", "--output-dir", same, code=1)
    said = run("patch", same, "rope", "--output-dir", same, "--overwrite")
    assert f"unpatch {same} --output-dir {same}-original" in said and f"--teacher {same}-original" in said
    assert torch.equal(loaded(Path(same))[1], loaded(new)[1])


@pytest.mark.parametrize("there", [False, True], ids=["new", "overwritten"])
def test_a_full_disk_leaves_no_half_folder(folders, tmp_path, there):
    resource = pytest.importorskip("resource")
    if there:
        shutil.copytree(folders / "patched", tmp_path / "new")
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # enough for a config, not for weights
    try:
        error = run("patch", folders / "bert", "rope", "--output-dir", tmp_path / "new", "--overwrite", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in error and contents(tmp_path) == before
    assert len(list(tmp_path.rglob("*"))) == len(before) + there


@pytest.mark.parametrize("name", [("unpatch",), ("extend", "--no-limit")], ids=lambda name: name[0])
def test_what_is_there_is_kept(folders, tmp_path, monkeypatch, name):
    """All commands that save a model keep existing files as `patch` does."""
    (tmp_path / "notes.txt").write_text("mine")
    assert "isn't empty" in run(name[0], folders / "patched", *name[1:], "--output-dir", tmp_path, code=1)
    model = shutil.copytree(folders / "patched", tmp_path / "model")
    mine = [".git", "7_days", "checkpoint-3", "evaluation.json", "model-best.safetensors", "notes.txt"]
    files = (".git/HEAD", "7_days/a", "checkpoint-3/optimizer.pt", *mine[3:])
    for kept in files:
        (model / kept).parent.mkdir(exist_ok=True)
        (model / kept).write_text("mine")
    for stale in ("model.fp16.safetensors", "pytorch_model.bin", "merges.txt", "added_tokens.json"):
        (model / stale).write_text("stale")
    (model / "modules.json").write_text(json.dumps([{"path": "1_Pooling"}, {"path": "checkpoint-3"}]))
    (model / "1_Pooling").mkdir()
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    said = run(name[0], model, *name[1:], "--output-dir", model, "--overwrite")
    assert f"Kept in {model}: {', '.join(mine)}. Check" in said
    names = {path.name for path in model.iterdir() if path.suffix != ".py"}
    assert names - {"generation_config.json"} == {*mine, "config.json", "model.safetensors"}
    assert {(model / kept).read_text() for kept in files} == {"mine"}


def test_a_command_is_repeated_after_an_interrupted_save(folders, tmp_path):
    """Such a save leaves its staging directory and, at worst, a directory without config.json."""
    (tmp_path / ".cache" / "huggingface" / "posenc-0").mkdir(parents=True)
    run("patch", folders / "bert", "rope", "--output-dir", tmp_path)
    (tmp_path / "config.json").unlink()
    run("patch", folders / "bert", "rope", "--output-dir", tmp_path, "--overwrite")
    assert AutoModel.from_pretrained(tmp_path) and not (tmp_path / ".cache").exists()


# The command itself.


def test_push_without_a_token_or_a_hub(folders, tmp_path):
    """tests/test_hub.py tests the pushed files."""
    code = """
import os, sys
os.environ |= {"HF_HUB_OFFLINE": "0", "HF_HOME": sys.argv[2], "HF_ENDPOINT": "http://127.0.0.1:9"}
os.environ.pop("HF_TOKEN", None)
from typer.testing import CliRunner
from hf_posenc.cli import app
for token in {}, {"HF_TOKEN": "hf_x"}:
    done = CliRunner(env=token).invoke(app, ["push", sys.argv[1], "me/x"])
    print(done.exit_code, type(done.exception).__name__, done.stderr.splitlines()[-1])
"""
    without_token, without_hub = run_python(code, folders / "patched", tmp_path, fresh=True).splitlines()
    assert without_token.startswith("1 SystemExit Error: No token for the Hub")
    assert without_hub.startswith("1 SystemExit Error: ") and "onnect" in without_hub


def test_a_bug_shows_where_it_is():
    """Errors that the user can fix are printed in one line. Bugs show their traceback."""
    faulty = typer.Typer(cls=Group, pretty_exceptions_enable=False)

    @faulty.command()
    def fault(kind: str):
        raise {"missing": ImportError("pip install sentencepiece"), "bug": KeyError("unforeseen")}[kind]

    faulty.callback()(lambda: None)
    done = CliRunner().invoke(faulty, ["fault", "missing"])
    assert done.exit_code == 1 and done.stderr == "Error: pip install sentencepiece\n"
    assert isinstance(CliRunner().invoke(faulty, ["fault", "bug"]).exception, KeyError)


def test_help_and_version():
    shown = run("--help")
    assert all(name in shown for name in ("list", "inspect", "patch", "unpatch", "extend", "model-card", "push"))
    assert run("--version") == f"{hf_posenc.__version__}\n"


AS_A_COMMAND = r"""
import runpy, sys
import hf_posenc
assert "typer" not in sys.modules, "importing the package asks for it"
sys.stderr = sys.stdout
for words in (["list", "--json"], ["inspect", "nowhere"]):
    sys.argv[1:] = words
    try:
        runpy.run_module("hf_posenc", run_name="__main__")
    except SystemExit as stop:
        print(stop.code, end="\0")
for name in [name for name in sys.modules if name.startswith("hf_posenc.cli")]:
    del sys.modules[name]
sys.modules["typer"] = None
try:
    import hf_posenc.cli
except SystemExit as stop:
    print(stop)
"""


def test_as_a_command(tmp_path, monkeypatch):
    """The command returns exit codes, finds a custom encoding only with --import, and reports a missing typer."""
    code = "import hf_posenc\n\n\nclass Mine(hf_posenc.PositionEncoding, type='own-cli'):\n    'Mine.'\n"
    (tmp_path / "own_cli_encoding.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    listed, error, without = run_python(AS_A_COMMAND, fresh=True).split("\0")
    assert "own-cli" not in listed and listed.endswith("}\n0") and error.startswith("Error: ") and error.endswith("\n1")
    assert "pip install" in without
    assert "own-cli" in json.loads(run("--import", "own_cli_encoding", "list", "--json"))
    assert "No module named 'no_such'" in run("--import", "no_such", "list", code=1)
