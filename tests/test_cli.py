"""The command line: thin over the API, errors in a line, nothing half written."""

import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, BertTokenizer, RobertaForMaskedLM
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from typer.testing import CliRunner

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc.cli import Group, app
from models import ENCODINGS, LENGTH, first, patched, slow, stock, tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a stock BERT with its tokenizer, a stock RoBERTa without, and a patched BERT."""
    path = tmp_path_factory.mktemp("models")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    stock("bert", "ForMaskedLM").save_pretrained(path / "bert")
    BertTokenizer(str(path / "vocab.txt"), model_max_length=LENGTH).save_pretrained(path / "bert")
    stock("roberta", "ForMaskedLM").save_pretrained(path / "roberta")
    patched("bert", "alibi").save_pretrained(path / "patched")
    return path


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    assert isinstance(done.exception, SystemExit | None)
    return done.stdout if code == 0 else done.stderr


def command(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=120)


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
    assert listed["t5"] == {
        "title": "T5's relative position bias",
        "aliases": {},
        "mechanisms": ["distance_bias"],
        "options": {
            "num_buckets": {"default": 32, "allowed": "an integer above 0"},
            "max_distance": {"default": 128, "allowed": "an integer above 0"},
            "per_layer": {"default": False, "allowed": "True or False"},
        },
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
    assert "give one of them" in run("list", "--json", "--markdown", code=1)


def test_the_page_of_encodings_is_fresh():
    """After a change of a class: hf-posenc list --markdown, between the markers of docs/encodings.md."""
    page = (ROOT / "docs" / "encodings.md").read_text()
    before, _, rest = page.partition("<!-- hf-posenc list --markdown -->\n")
    table, _, behind = rest.partition("<!-- end -->")
    assert before and behind and table == run("list", "--markdown")


def test_list_shows_all_of_it():
    """In 80 columns, as in a pipe; wrapped, but nothing cut."""
    shown = run("list")
    words = re.sub(r"[\s│]+", " ", shown)
    for name, row in json.loads(run("list", "--json")).items():
        assert all(word in words for word in (name, *row["aliases"], *row["mechanisms"], *row["papers"]))
        assert all(f"{option} = {said['default']!r}" in words for option, said in row["options"].items())
    assert "terms='keys+queries'" in shown and not re.search(r"…|\[/", shown) and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", ["bert", "roberta", "patched"])
def test_inspect(folders, name):
    report = asdict(hf_posenc.inspect(folders / name))
    assert json.loads(run("inspect", folders / name, "--json")) == json.loads(json.dumps(report))
    shown = run("inspect", folders / name)
    assert "usable length: " + ("no limit" if name == "patched" else f"{LENGTH} tokens") in shown


def test_errors_are_shown_as_they_are(tmp_path):
    """A path is no markup."""
    assert f"{tmp_path}/[b]nowhere" in run("inspect", tmp_path / "[b]nowhere", code=1)


def test_inspect_says_what_is_ignored(folders, tmp_path):
    config = json.loads((folders / "bert" / "config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "ignored: position_embedding_type='relative_key'" in run("inspect", tmp_path)


def test_patch_saves_the_model_with_its_head_and_tokenizer(folders, tmp_path):
    shown = run(
        *("patch", folders / "bert", "sinusoidal+rotary", "--option", "sinusoidal__base=500", "--option"),
        *("rope__layout=interleaved", "--max-length", 40, "--inject", "every_layer", "--output-dir", tmp_path / "deep" / "new"),
    )
    assert "usable length: 40 tokens" in shown and "distil" in shown
    expected = hf_posenc.patch(
        AutoModelForMaskedLM.from_pretrained(folders / "bert"),
        {"type": "sinusoidal+rope", "sinusoidal": {"base": 500.0}, "rope": {"layout": "interleaved"}},
        max_length=40,
        inject="every_layer",
    )
    torch.save((tokens(), first(expected(tokens()))), tmp_path / "expected.pt")
    code = """
import sys, torch, hf_posenc
from transformers import AutoModelForMaskedLM
ids, expected = torch.load(sys.argv[2])
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
print(type(model).__name__, torch.equal(model(ids)[0], expected))
"""
    assert run_python(code, tmp_path / "deep" / "new", tmp_path / "expected.pt").split() == ["PosEncBertForMaskedLM", "True"]
    assert AutoTokenizer.from_pretrained(tmp_path / "deep" / "new").model_max_length == 40
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]
    assert not [path for path in (tmp_path / "deep" / "new").iterdir() if path.is_dir()]


def test_patch_without_a_limit_or_a_tokenizer(folders, tmp_path):
    run("patch", folders / "bert", '{"type": "alibi"}', "--output-dir", tmp_path / "bert")
    saved = json.loads((tmp_path / "bert" / "tokenizer_config.json").read_text())
    assert saved["model_max_length"] == VERY_LARGE_INTEGER == AutoTokenizer.from_pretrained(tmp_path / "bert").model_max_length
    assert "no tokenizer" in run("patch", folders / "roberta", "t5", "--no-keep-original", "--output-dir", tmp_path / "roberta")
    model = hf_posenc.PosEncRobertaForMaskedLM.from_pretrained(tmp_path / "roberta")
    assert isinstance(model, RobertaForMaskedLM) and not model.config.position_encoding["original"]["kept"]


def test_an_older_model_has_a_vocabulary_alone(folders, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    stock("bert", "ForMaskedLM").save_pretrained(old)
    (old / "vocab.txt").write_bytes((folders / "vocab.txt").read_bytes())
    assert "no tokenizer" not in run("patch", old, "learned", "--output-dir", new)
    tokenizer = AutoTokenizer.from_pretrained(new)
    assert tokenizer.model_max_length == LENGTH and tokenizer("a b").input_ids == [2, 5, 6, 3]


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


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_patch_keeps_the_modules_of_a_sentence_transformer(sentences, tmp_path):
    from sentence_transformers import SentenceTransformer

    shown = run("patch", sentences, "relative", "--output-dir", tmp_path / "new")
    assert "not saved" not in shown and "no tokenizer" not in shown
    before, after = (SentenceTransformer(str(path), device="cpu") for path in (sentences, tmp_path / "new"))
    assert type(after[0].model).__name__ == "PosEncBertModel" and str(list(after)[1:]) == str(list(before)[1:])
    assert (after.prompts["query"], after.similarity_fn_name, after.max_seq_length) == ("a b ", "dot", VERY_LARGE_INTEGER)
    expected = hf_posenc.patch(before, "relative")
    expected[0].model.load_state_dict(after[0].model.state_dict())  # biases are drawn at random
    assert (after.encode(["a b a"]) == expected.encode(["a b a"])).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_patch_takes_the_other_models_of_sentence_transformers(folders, tmp_path):
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(folders / "bert"), device="cpu").save_pretrained(str(tmp_path / "old"), create_model_card=False)
    shown = run("patch", tmp_path / "old", "alibi", "--output-dir", tmp_path / "new")
    found = CrossEncoder(str(tmp_path / "new"), device="cpu")
    assert type(found[0].model).__name__ == "PosEncBertForSequenceClassification" and "distil" not in shown
    about = tmp_path / "old" / "config_sentence_transformers.json"
    about.write_text(json.dumps({"model_type": "Tagger"}))
    error = run("patch", tmp_path / "old", "alibi", "--output-dir", tmp_path / "newer", code=1)
    assert "model_type 'Tagger'. Allowed: SentenceTransformer, CrossEncoder" in error


@pytest.mark.parametrize(
    ("command", "place"),
    [(command, "the first module") for command in ("patch", "eval", "distill.py")]
    + [("patch", "another module"), ("patch", "a module of a router"), ("patch", "a router without an end")],
)
def test_code_of_a_sentence_transformer_is_not_run(sentences, launch, tmp_path, command, place):
    """sentence-transformers 5 runs the code of local directories without trust_remote_code. 6 refuses, with advice that the
    command line can't follow."""
    model, ran = shutil.copytree(sentences, tmp_path / "model"), tmp_path / "ran"
    (model / "stranger.py").write_text(f"open({str(ran)!r}, 'w')\nfrom torch.nn import Identity as Custom\n")
    modules = json.loads((model / "modules.json").read_text())
    if "router" in place:
        (model / "2_Normalize").mkdir(exist_ok=True)
        modules[2]["type"] = "sentence_transformers.base.modules.router.Router"
        router = {"types": {"query_0": "stranger.Custom"}, "structure": {"query": ["query_0"]}, "parameters": {}}
        if place == "a router without an end":
            router["types"] = {".": modules[2]["type"]}
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
    refusal = "a module of class 'stranger.Custom', which isn't part of sentence-transformers, and was not loaded"
    assert ("lists more than 1000 modules" if "end" in place else refusal) in error
    assert not ran.exists() and not (tmp_path / "new").exists()


def test_without_sentence_transformers_its_modules_are_not_dropped_silently(sentences, tmp_path):
    code = """
import sys
sys.modules["sentence_transformers"] = None
from hf_posenc.cli import app
from hf_posenc.training import sentences
try:
    sentences.load(sys.argv[1])
except SystemExit as refusal:
    print(refusal)
app(["patch", sys.argv[1], "alibi", "--output-dir", sys.argv[2]])
"""
    said = run_python(code, sentences, tmp_path / "new")
    assert f"{sentences} has modules of sentence-transformers: pip install sentence-transformers" in said
    assert "modules (pooling) are not saved: pip install sentence-transformers, and do it again" in said
    assert (tmp_path / "new" / "config.json").exists() and not (tmp_path / "new" / "modules.json").exists()


@pytest.mark.parametrize(
    ("kind", "keeping"),
    [("sentences", ()), slow("older sentences", ()), ("plain", ()), slow("plain", ("--no-keep-original",))],
)
def test_the_command_that_patch_prints_works(folders, sentences, launch, tmp_path, kind, keeping):
    original = folders / "bert" if kind == "plain" else shutil.copytree(sentences, tmp_path / "original")
    if kind == "older sentences":  # whose Transformers model has a folder of its own
        (original / "0_Transformer").mkdir()
        for file in {*original.glob("*token*"), *original.glob("*.txt"), *original.glob("model*"), original / "config.json"}:
            file.rename(original / "0_Transformer" / file.name)
        (original / "sentence_bert_config.json").rename(original / "0_Transformer" / "sentence_bert_config.json")
        listed = json.loads((original / "modules.json").read_text())
        (original / "modules.json").write_text(json.dumps([{**listed[0], "path": "0_Transformer"}, *listed[1:]]))
    shown = run("patch", original, "alibi", *keeping, "--output-dir", tmp_path / "a new one")
    python, flag, module, *given = shlex.split(shown.splitlines()[-1])
    assert (python, flag, module) == ("python", "-m", "hf_posenc.training.distill")
    (tmp_path / "texts.txt").write_text("a b\nb a b\n" * 9)
    few = ["--train_file", tmp_path / "texts.txt", "--max_train_steps", 2, "--min_text_length", 3, "--text_length", 8]
    codes, said = launch("distill", *given, *few)
    assert codes == [0], said
    assert (tmp_path / "a new one-distilled" / "modules.json").exists() == (kind != "plain")


@pytest.mark.parametrize(
    ("encoding", "arguments", "words"),
    [
        ("alibbi", (), "unknown position encoding 'alibbi'"),
        ("rope", ("--option", "thetta=3"), "has no option 'thetta'"),
        ("rope", ("--option", "theta=[1, 2]"), "rope.theta=[1, 2]: allowed is a finite number above 1"),
        ("rope", ("--option", "theta"), "'theta': give name=value"),
        ("rope", ("--option", "=3"), "'=3': give name=value"),
        ("rope", ("--option", "theta=3", "--option", "theta=4"), "'theta=4': 'theta' is given twice"),
        ('{"type": "rope", "theta": 3}', ("--option", "theta=4"), "'theta' is given twice"),
        *(
            ("rope", ("--option", f"{name}=3"), f"'{name}' is no option of an encoding; see hf-posenc patch --help")
            for name in ("type", "max_length", "layers", "inject", "original")
        ),
        *(("rope", ("--option", f"{name}=3"), f"has no option '{name}'") for name in ("model", "encoding", "keep_original")),
        ("{type: rope}", (), "is no JSON"),
        ('{"type":' * 50_000, (), "is no JSON: it is nested too deeply"),
        ('{"type": "rope", "theta": 3, "theta": 4}', (), "has the entry 'theta' twice"),
        *(
            ("rope", (f"--{flag}", f"{name}{value}"), words)
            for flag, name in (("option", "theta="), ("where", ""), ("layers", ""))
            for value, words in (("[" * 100_000, "is nested too deeply"), ("9" * 5_000, "is an integer with too many digits"))
        ),
        ('{"theta": 3}', (), "a position encoding is a name or a dict"),
        ("alibi", ("--inject", "every_layer"), "'alibi' makes none"),
        ("sinusoidal", ("--inject", "output"), "inject='output'"),
        ("alibi", ("--max-length", "0"), "max_length=0"),
    ],
)
def test_patch_refuses(folders, tmp_path, encoding, arguments, words):
    error = run("patch", folders / "bert", encoding, *arguments, "--output-dir", tmp_path / "new", code=1)
    assert words in error and "Traceback" not in error and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ((), {}),
        (("--layers", "3::4"), {"layers": "3::4"}),
        (("--layers", "[0, 2]"), {"layers": [0, 2]}),
        (("--option", "rope__layers=0::2"), {}),
    ],
)
def test_patch_hands_layers_on_where_given(folders, tmp_path, monkeypatch, arguments, given):
    def patch(model, encoding, **keywords):
        raise ValueError(json.dumps({key: value for key, value in keywords.items() if key == "layers"}))

    monkeypatch.setattr(hf_posenc, "patch", patch)
    error = run("patch", folders / "bert", "rope+alibi", *arguments, "--output-dir", tmp_path / "new", code=1)
    assert json.loads(error.partition("Error: ")[2]) == given


@pytest.mark.parametrize(
    ("text", "given"),
    [("encoder", "encoder"), ('["encoder", "cross"]', ["encoder", "cross"]), ('{"cross": "rope"}', {"cross": "rope"})],
)
def test_patch_hands_where_on(folders, tmp_path, monkeypatch, text, given):
    def patch(model, encoding, **keywords):
        raise ValueError(json.dumps(keywords["where"]))

    monkeypatch.setattr(hf_posenc, "patch", patch)
    error = run("patch", folders / "bert", "alibi", "--where", text, "--output-dir", tmp_path / "new", code=1)
    assert json.loads(error.partition("Error: ")[2]) == given


@pytest.mark.parametrize("name", ["nothing/of/this/name", "./nothing", "/nothing", "a file", "a link"])
@pytest.mark.parametrize(
    "line",
    [
        ("inspect",),
        ("patch", "alibi", "--output-dir", "new"),
        ("convert", "alibi", "--texts", "my.txt", "--output-dir", "new"),
        ("unpatch", "--output-dir", "new"),
        ("extend", "--no-limit", "--output-dir", "new"),
        ("eval", "--texts", "my.txt"),
        ("bench",),
        ("push", "me/x"),
        ("plot attention", "--texts", "my.txt", "--output", "new.png"),
    ],
    ids=lambda line: line[0],
)
def test_a_directory_that_does_not_exist(tmp_path, monkeypatch, line, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("a b\n" * 30)
    os.mkfifo("a file")
    os.symlink("nothing", "a link")
    command, *others = line
    words = "isn't a directory" if name == "a file" else f"the directory '{name.removeprefix('./')}' doesn't exist"
    error = " ".join(run(*command.split(), name, *others, code=1).split()).replace("'./", "'")
    assert f"{words}. Give the directory of a saved model, or its id on the Hub" in error
    assert "Repo id" not in error and not os.path.exists("new")


def test_a_pipe_among_the_files_of_a_model(folders, tmp_path):
    shutil.copytree(folders / "bert", tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    os.mkfifo(tmp_path / "model" / "config.json")
    assert "config.json isn't a regular file. Remove it" in run("inspect", tmp_path / "model", code=1)


def test_code_elsewhere_is_not_named_by_the_copy(folders, tmp_path, caplog):
    """Neither by the tokenizer nor by the config of a model without an encoding, whose classes are Transformers' own."""
    shutil.copytree(folders / "bert", tmp_path / "model")
    for name, key in (("tokenizer_config.json", "AutoTokenizer"), ("config.json", "AutoModel")):
        values = json.loads((tmp_path / "model" / name).read_text())
        values["auto_map"] = {key: ["someone/else--code.Odd", None]} if "Tok" in key else {key: "someone/else--code.Model"}
        (tmp_path / "model" / name).write_text(json.dumps(values))
    for line in (("patch", "alibi"), ("extend", "--max-length", 48, "--method", "linear")):
        caplog.clear()
        run(line[0], tmp_path / "model", *line[1:], "--output-dir", tmp_path / line[0])
        assert not [file for file in (tmp_path / line[0]).iterdir() if b"someone" in file.read_bytes()]
        assert "The tokenizer's auto_map refers to code that isn't saved with it (someone/else--code.Odd)" in caplog.text
        assert ("The config's auto_map refers to" in caplog.text) == (line[0] == "extend")
    assert AutoTokenizer.from_pretrained(tmp_path / "patch")("a b").input_ids == [2, 5, 6, 3]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_code_elsewhere_is_not_named_by_modules(sentences, tmp_path, caplog):
    """Of sentence-transformers: its processor is the tokenizer."""
    from sentence_transformers import SentenceTransformer

    outer = SentenceTransformer(str(sentences), device="cpu")
    outer.tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["someone/else--code.Odd", None]}
    hf_posenc.patch(outer, "alibi").save_pretrained(str(tmp_path), create_model_card=False)
    assert not [file for file in tmp_path.rglob("*.json") if "someone" in file.read_text()]
    assert "(someone/else--code.Odd)" in caplog.text and "auto_map" in outer.tokenizer.init_kwargs


def test_patch_refuses_a_patched_model(folders, tmp_path):
    assert "already" in run("patch", folders / "patched", "rope", "--output-dir", tmp_path / "new", code=1)
    assert not list(tmp_path.iterdir())


def damaged(path):
    path.write_bytes(path.read_bytes()[:-1])


def mismatched(path):
    save_file({key: value[:-1] for key, value in load_file(path).items()}, path, {"format": "pt"})


def config(**changes):
    return json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], **changes})


HOSTILE = {
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "a list": b"[]",
    "a number": b"3",
    "nothing": b"",
    "a byte order mark and half an object": b"\xef\xbb\xbf{",
    "no UTF-8": b"\xff\xfe\x00\x9c",
    "an endless integer": b'{"model_type": ' + b"9" * 5_000 + b"}",
    "a directory": None,
}
"""Contents of any JSON file."""
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
            pytest.param(file, content, id=f"{file}: {name}")
            for file in ("tokenizer.json", "model.safetensors.index.json")
            for name, content in HOSTILE.items()
            if name in ("nested lists", "a list", "no UTF-8")
        ),
        *(("modules.json", HOSTILE["nested lists"]), ("config_sentence_transformers.json", b"[]")),
        *(("pytorch_model.bin", content) for content in (b"", b"\x80\x02garbage", b"PK\x03\x04", None)),
        *(
            ("model.safetensors", content)
            for content in (b"", b"\xff" * 99, (9_000).to_bytes(8, "little") + b"[" * 9_000, None)
        ),
    ],
)
def test_files_that_no_library_reads(folders, tmp_path, file, content):
    """Errors in one line, from every file of a model."""
    model = tmp_path / "model"
    shutil.copytree(folders / "bert", model)
    if file in ("pytorch_model.bin", "model.safetensors.index.json"):
        (model / "model.safetensors").unlink()
    if file == "config_sentence_transformers.json":
        (model / "modules.json").write_text("[]")
    (model / file).unlink(missing_ok=True)
    if content is None:
        (model / file).mkdir()
    else:
        (model / file).write_bytes(content.encode() if isinstance(content, str) else content)
    lines = [("patch", model, "alibi", "--output-dir", tmp_path / "new", "--json")]
    lines += [("inspect", model)] if file == "config.json" else []
    for line in lines:
        error = run(*line, code=1)
        said = error.strip().splitlines()[-1]
        assert re.match(r"Error: .*model", said) and "Traceback" not in error and "weights_only" not in error
        assert 40 < len(said) < 900
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("damage", [damaged, mismatched, os.remove], ids=lambda damage: damage.__name__)
def test_damaged_weights(folders, tmp_path, damage):
    stock("bert", "ForMaskedLM").save_pretrained(tmp_path / "model")
    damage(tmp_path / "model" / "model.safetensors")
    for arguments in (
        ("patch", tmp_path / "model", "rope", "--output-dir", tmp_path / "new"),
        ("push", tmp_path / "model", "me/x"),
    ):
        assert "\nError: " in "\n" + run(*arguments, code=1) and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_patch_keeps_what_is_there(folders, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for arguments, words in ((), "isn't empty"), (("--overwrite",), "holds no model"):
        assert words in run("patch", folders / "bert", "alibi", "--output-dir", tmp_path, *arguments, code=1)
    assert "is a file" in run("patch", folders / "bert", "alibi", "--output-dir", notes, "--overwrite", code=1)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_patch_overwrites_a_model(folders, tmp_path):
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


def test_patch_in_place(folders, tmp_path):
    model = stock("bert", "ForMaskedLM")
    model.save_pretrained(tmp_path)
    assert "isn't empty" in run("patch", tmp_path, "rope", "--output-dir", tmp_path, code=1)
    run("patch", tmp_path, "rope", "--output-dir", tmp_path, "--overwrite")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(first(again(tokens())), first(hf_posenc.patch(model, "rope")(tokens())))


@pytest.mark.parametrize("there", [False, True], ids=["new", "overwritten"])
def test_a_full_disk_leaves_no_half_folder(folders, tmp_path, there):
    resource = pytest.importorskip("resource")
    if there:
        patched("bert", "alibi").save_pretrained(tmp_path / "new")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # enough for a config, not for weights
    try:
        error = run("patch", folders / "bert", "rope", "--output-dir", tmp_path / "new", "--overwrite", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert len(list(tmp_path.rglob("*"))) == len(before) + there


def test_push_reads_the_folder_first(tmp_path):
    assert "Error" in run("push", tmp_path / "nowhere", "me/x", code=1)


def test_push_without_a_token_or_a_hub(folders, tmp_path):
    """tests/test_hub.py has what is pushed."""
    code = """
import os, sys
os.environ |= {"HF_HUB_OFFLINE": "0", "HF_HOME": sys.argv[2], "HF_ENDPOINT": "http://127.0.0.1:9"}
os.environ.pop("HF_TOKEN", None)
from typer.testing import CliRunner
from hf_posenc.hub import requests
from hf_posenc.cli import app
requests.PAUSE = 0
for token in {}, {"HF_TOKEN": "hf_x"}:
    done = CliRunner(env=token).invoke(app, ["push", sys.argv[1], "me/x"])
    print(done.exit_code, type(done.exception).__name__, done.stderr.splitlines()[-1])
"""
    without_token, without_hub = run_python(code, folders / "patched", tmp_path, fresh=True).splitlines()
    assert without_token.startswith("1 SystemExit Error: there is no token for the Hub")
    assert without_hub.startswith("1 SystemExit Error: ") and "HF_HUB_OFFLINE=1" in without_hub


def test_a_bug_shows_where_it_is():
    """What the user can mend is said in a line; a fault of ours isn't hidden behind one."""
    faulty = typer.Typer(cls=Group, pretty_exceptions_enable=False)

    @faulty.command()
    def fault(kind: str):
        raise {"missing": ImportError("pip install sentencepiece"), "bug": KeyError("unforeseen")}[kind]

    faulty.callback()(lambda: None)
    done = CliRunner().invoke(faulty, ["fault", "missing"])
    assert done.exit_code == 1 and done.stderr == "Error: pip install sentencepiece\n"
    assert isinstance(CliRunner().invoke(faulty, ["fault", "bug"]).exception, KeyError)


def test_as_a_command(folders):
    done = command("-m", "hf_posenc.cli", "inspect", folders / "nowhere")
    assert done.returncode == 1 and done.stderr.startswith("Error:") and "Traceback" not in done.stderr and not done.stdout


def test_help():
    shown = run("--help")
    assert all(name in shown for name in ("list", "inspect", "patch", "unpatch", "extend", "model-card", "push"))
    assert "Missing option" in run("patch", "model", "alibi", code=2)
    assert "Did you mean 'extend'?" in run("extnd", code=2) and "--max-length" in run("extend", "x", "--max-lenth", 3, code=2)


@pytest.mark.parametrize("name", ["list", "inspect", "patch", "unpatch", "extend", "model-card", "push"])
def test_help_has_an_example(name):
    assert f"hf-posenc {name} " in run(name, "--help")


def test_version():
    assert run("--version") == f"{hf_posenc.__version__}\n"


def test_without_typer():
    """Which importing the package doesn't ask for."""
    code = """
import sys, hf_posenc
assert "typer" not in sys.modules
sys.modules["typer"] = None
try:
    import hf_posenc.cli
except SystemExit as stop:
    print(stop)
"""
    assert 'pip install "hf-posenc[cli]"' in run_python(code, fresh=True)


def test_an_encoding_of_ones_own(tmp_path, monkeypatch):
    code = "import hf_posenc\n\n\nclass Mine(hf_posenc.PositionEncoding, type='own-cli'):\n    'Mine.'\n"
    (tmp_path / "own_cli_encoding.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    elsewhere = "import runpy; runpy.run_module('hf_posenc.cli', run_name='__main__')"
    assert "own-cli" not in json.loads(run_python(elsewhere, "list", "--json"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    listed = json.loads(run("--import", "own_cli_encoding", "list", "--json"))
    assert "own-cli" in listed
    assert "No module named 'no_such'" in run("--import", "no_such", "list", code=1)


def positions(folder):
    """The class of a saved model, its logits, and its tokenizer's length."""
    model = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer_config.json").exists() else None
    return type(model).__name__, first(model(tokens())), tokenizer and tokenizer.model_max_length


def test_extend_and_unpatch(folders, tmp_path):
    run("patch", folders / "bert", "relative", "--max-length", 30, "--output-dir", tmp_path / "new")
    shown = run("extend", tmp_path / "new", "--max-length", 40, "--output-dir", tmp_path / "longer")
    assert "usable length: 40 tokens" in shown and f"saved to {tmp_path / 'longer'}" in shown and "distil" not in shown
    run("extend", tmp_path / "new", "--no-limit", "--output-dir", tmp_path / "new", "--overwrite")
    assert "usable length: 24 tokens" in run("unpatch", tmp_path / "longer", "--output-dir", tmp_path / "back")
    _, patched_logits, length = positions(tmp_path / "longer")
    assert length == 40 and positions(tmp_path / "new")[2] == VERY_LARGE_INTEGER
    assert torch.equal(patched_logits, positions(tmp_path / "new")[1])
    kind, logits, length = positions(tmp_path / "back")
    assert kind == "BertForMaskedLM" and length == LENGTH and torch.equal(logits, positions(folders / "bert")[1])
    assert not list((tmp_path / "back").glob("*.py"))


def test_unpatch_says_what_it_gives(folders, tmp_path):
    """Of a trained model, of one without its host's positions, and of one without a tokenizer."""
    model = patched("bert", "alibi", "ForMaskedLM")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight += 1
    model.save_pretrained(tmp_path / "trained")
    shown = run("unpatch", tmp_path / "trained", "--output-dir", tmp_path / "back")
    assert "Note: the weights are no longer those which were patched" in shown and "no tokenizer" in shown
    hf_posenc.patch(stock("bert"), "alibi", keep_original=False).save_pretrained(tmp_path / "bare")
    for name, words in (("bare", "positions were not kept"), ("back", "is not patched: there is nothing to undo")):
        assert words in run("unpatch", tmp_path / name, "--output-dir", tmp_path / "new", code=1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give the new maximum length, --max-length or --no-limit"),
        (("--max-length", 9, "--no-limit"), "--max-length 9 and --no-limit: give one of them, not both"),
        (("--max-length", 9), "max_length=9 would make the longest input shorter"),
        (("--max-length", 0), "max_length=0"),
    ],
)
def test_extend_refuses(folders, tmp_path, arguments, words):
    assert words in run("extend", folders / "patched", *arguments, "--output-dir", tmp_path / "new", code=1)
    assert "is not patched" in run("extend", folders / "bert", "--no-limit", "--output-dir", tmp_path / "new", code=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [("unpatch",), ("extend", "--no-limit")], ids=lambda name: name[0])
def test_what_is_there_is_kept(folders, tmp_path, name):
    """By all commands that save a model, as by patch."""
    (tmp_path / "notes.txt").write_text("mine")
    assert "isn't empty" in run(name[0], folders / "patched", *name[1:], "--output-dir", tmp_path, code=1)
    patched("bert", "alibi").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    for kept in (".git/HEAD", "checkpoint-3/optimizer.pt", "evaluation.json", "model-best.safetensors", "7_days/a"):
        (tmp_path / "model" / kept).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / kept).write_text("mine")
    for stale in ("model.fp16.safetensors", "pytorch_model.bin", "merges.txt", "added_tokens.json"):
        (tmp_path / "model" / stale).write_text("stale")
    (tmp_path / "model" / "modules.json").write_text(json.dumps([{"path": "1_Pooling"}, {"path": "checkpoint-3"}]))
    (tmp_path / "model" / "1_Pooling").mkdir()
    with pytest.MonkeyPatch.context() as without:
        without.setitem(sys.modules, "sentence_transformers", None)
        said = run(name[0], tmp_path / "model", *name[1:], "--output-dir", tmp_path / "model", "--overwrite")
    mine = [".git", "7_days", "checkpoint-3", "evaluation.json", "model-best.safetensors", "notes.txt"]
    assert f"Kept in {tmp_path / 'model'}: {', '.join(mine)}. Check" in said
    names = {path.name for path in (tmp_path / "model").iterdir() if path.suffix != ".py"}
    assert names - {"generation_config.json"} == {*mine, "config.json", "model.safetensors"}
    assert (tmp_path / "model" / "notes.txt").read_text() == (tmp_path / "model" / ".git" / "HEAD").read_text() == "mine"


def killed_unpatch(folder, name):
    """`unpatch FOLDER --output-dir FOLDER --overwrite`, killed before a file is renamed into its place."""
    if not (child := os.fork()):

        def kill(event, arguments):
            if event == "os.rename" and str(arguments[1]) == str(folder / name) and Path(arguments[0]).parent.name == "files":
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        run("unpatch", folder, "--output-dir", folder, "--overwrite")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors", "tokenizer.json", "config.json"])
def test_an_interrupted_unpatch_over_its_own_directory(folders, tmp_path, caplog, name):
    """The next command undoes it and says so. The same command succeeds."""
    model = hf_posenc.patch(stock("gpt2", "LMHeadModel"), "rope")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    AutoTokenizer.from_pretrained(folders / "bert").save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    killed_unpatch(tmp_path, name)
    assert not (tmp_path / "config.json").exists()
    run("inspect", tmp_path)
    assert caplog.messages == [
        f"The last save into {tmp_path} was interrupted. It has been undone; the earlier files are kept."
    ]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    killed_unpatch(tmp_path, name)
    run("unpatch", tmp_path, "--output-dir", tmp_path, "--overwrite")
    assert len(caplog.messages) == 2 and (tmp_path / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob("*posenc*")) and not list(tmp_path.glob("*-of-*")) and AutoTokenizer.from_pretrained(tmp_path)
    assert torch.equal(
        first(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens())), first(hf_posenc.unpatch(model)(tokens()))
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_modules_of_sentence_transformers_stay(sentences, tmp_path):
    """Through all commands that save a model."""
    from sentence_transformers import SentenceTransformer

    run("patch", sentences, "alibi", "--max-length", "16", "--output-dir", tmp_path / "patched")
    run("extend", tmp_path / "patched", "--max-length", "40", "--output-dir", tmp_path / "longer")
    run("unpatch", tmp_path / "longer", "--output-dir", tmp_path / "stock")
    models = [SentenceTransformer(str(folder)) for folder in (sentences, tmp_path / "stock", tmp_path / "longer")]
    assert {tuple(type(module) for module in model) for model in models} == {tuple(type(module) for module in models[0])}
    assert models[2].max_seq_length == 40
    expected, actual = (model.encode(["w1 w2 w3"]) for model in models[:2])
    assert (expected == actual).all()


def test_the_original_is_restored_before_it_teaches(tmp_path):
    """`patch` over its own directory replaces the original, which can't be named as the teacher any more."""
    stock("bert", "ForMaskedLM").save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    said = run("patch", folder, "alibi", "--output-dir", folder, "--overwrite")
    assert f"unpatch {folder} --output-dir {folder}-original" in said and f"--teacher {folder}-original" in said
