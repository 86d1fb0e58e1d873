"""Properties of every subcommand of hf-posenc: its help, examples, words, JSON, tracebacks, and completion.

The tests find a new subcommand automatically. Its help contains its examples as `[bold]hf-posenc NAME …[/]`. They run here in a
directory with the models and files of `models`, which have the names from the examples.
"""

import inspect
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, BertTokenizer
from typer.testing import CliRunner

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc.cli import app, catalog, figures
from hf_posenc.cli.arguments import given_settings, given_where
from hf_posenc.cli.output import Output
from hf_posenc.evaluation import terminals
from models import stock, tiny

GROUP = typer.main.get_command(app)


def maximum_length(report):
    """The maximum length in a printed report of `inspect`."""
    return re.search(r"maximum length: +(.*)", report)[1].strip()


def leaves(group, *names):
    """Words -> command, for all commands that can run. `hf-posenc plot` is a group with its own commands."""
    found = {}
    for name, command in (figures.commands() if names == ("plot",) else group.commands).items():
        words = (*names, name)
        found |= leaves(command, *words) if hasattr(command, "commands") else {" ".join(words): command}
    return found


COMMANDS = leaves(GROUP)
EXAMPLE = re.compile(r"\[bold\](hf-posenc .*?)\[/\]", re.DOTALL)
SERVES = ("explore",)
"""Subcommands that run until they are stopped. tests/test_explore.py runs their examples."""
EXAMPLES = [
    example for name, command in COMMANDS.items() for example in EXAMPLE.findall(command.help or "") if name not in SERVES
]
TAKES_LONGER = ("convert", "plot")
"""Subcommands whose examples run with `make test-all` only. tests/test_plots.py draws with some of them."""
NO_OPTIONS = ("type", "max_length", "layers", "inject", "original")
WITH_VALUES = ("option theta=", "where ", "layers ")
WORDS = ["river", "stone", "window", "garden", "letter", "bridge", "candle", "forest", "mirror", "harbor", "meadow", "lantern"]


def command_of(example):
    words = shlex.split(example)[1:]
    return next(name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS)


def invoke(words, code=0, **environment):
    """Runs a command in this process, and returns its standard output and error."""
    done = CliRunner(env=environment).invoke(app, [str(word) for word in words], prog_name="hf-posenc")
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout, done.stderr


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The models and texts that the examples name. The models are tiny, and some have a tokenizer."""
    path = tmp_path_factory.mktemp("examples")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]))
    gpt2 = stock("gpt2", "LMHeadModel", n_positions=128)
    for name, length, model in (
        ("bert-base-uncased", 512, stock("bert", "ForMaskedLM", max_position_embeddings=512)),
        ("bert-alibi", 32, hf_posenc.patch(stock("bert", "ForMaskedLM"), "alibi", max_length=2048)),
        ("minilm-t5", 32, hf_posenc.patch(stock("bert", "ForMaskedLM"), "t5")),
        ("roberta-base", None, stock("roberta")),
        ("gpt2", 128, gpt2),
        ("gpt2-alibi", 128, hf_posenc.patch(gpt2, "alibi")),
        ("openai/clip-vit-base-patch32", 24, tiny("CLIPModel")),
        ("google/vit-base-patch16-224", None, stock("vit")),
    ):
        model.save_pretrained(path / name)
        if length:
            BertTokenizer(str(path / "vocab.txt"), model_max_length=length).save_pretrained(path / name)
    choose = random.Random(0)
    rows = [" ".join(" ".join(choose.choices(WORDS, k=9)).capitalize() + "." for _ in range(20)) for _ in range(40)]
    (path / "scripts").symlink_to(ROOT / "scripts")
    (path / "my.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return path


@pytest.fixture
def workplace(models, tmp_path, monkeypatch):
    """A copy of these models as the current directory."""
    shutil.copytree(models, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("name", COMMANDS)
def test_its_help(name):
    """The help has an example, and the default of each optional argument: a value, or words if None has a meaning."""
    command = COMMANDS[name]
    assert any(command_of(example) == name for example in EXAMPLE.findall(command.help or "")), "no example"
    if not command.add_help_option:  # its options are those of another program
        return
    shown, _ = invoke([*name.split(), "--help"], COLUMNS="300")
    rows = {}
    for parameter in command.params:
        row = next(line for line in shown.splitlines() if re.search(rf"│ *\*? *{re.escape(label(parameter))}(\.\.\.)? ", line))
        rows[parameter.name] = row
        # A switch is off unless it is given, and --help has no value.
        switch = getattr(parameter, "is_flag", False) and not parameter.secondary_opts
        assert switch or parameter.required == ("[required]" in row), f"{parameter.name}: {row}"
        assert switch or parameter.required or "[default: " in row, f"{parameter.name} hides its default"
    assert all(re.search(r"> +\S", row) for row in rows.values()), "an argument without a word about it"


def label(parameter):
    return parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, marks=[pytest.mark.slow] * (command_of(example).split()[0] in TAKES_LONGER), id=example[10:50])
        for example in EXAMPLES
    ],
)
def test_its_examples(workplace, example, monkeypatch):
    """Examples run unchanged. If a command supports --json, its standard output is one JSON document, even if a library prints
    something.
    """
    document = Output.plain_document
    monkeypatch.setattr(Output, "plain_document", lambda out, values: print("[x] a library's words") or document(out, values))
    words = shlex.split(example)[1:]
    made = words[words.index("--output-dir") + 1] if "--output-dir" in words else None
    ways = [words]
    if "--json" in flags(command_of(example)) and "--json" not in words:
        shutil.copytree(workplace, workplace.parent / "again", symlinks=True)
        ways.append([*words, "--json"])
    for folder, given in zip(("here", "again"), ways, strict=False):
        os.chdir(workplace.parent / folder)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        printed, beside = invoke(given)
        if "--json" in given:
            json.loads(printed, parse_constant=pytest.fail)
            assert "a library's words" in beside
        assert made is None or os.path.isfile(os.path.join(made, "config.json"))
        assert "--output" not in given or os.path.getsize(given[given.index("--output") + 1])


WRITTEN = """
import math, os, subprocess, sys
from hf_posenc.encodings import catalog
from hf_posenc.cli import app

entries = catalog.entries

def noisy():
    print("printed")
    os.write(1, b"written\\n")
    subprocess.run(["echo", "by a child"])
    return entries()

catalog.entries = noisy
app(sys.argv[1:])
"""


def test_only_the_document_is_on_standard_output():
    """In a separate process, output that bypasses Python's sys.stdout is redirected also."""
    assert "rope" in json.loads(run_python(WRITTEN, "list", "--json"))


def test_a_document_has_no_nan(capsys):
    Output(True).document({"loss": math.nan, "ratio": (1.0, math.inf)})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"loss": None, "ratio": [1.0, "inf"]}


@pytest.mark.parametrize(
    "line",
    [
        "inspect odd --json",
        "patch odd alibi --output-dir new --json",
        "convert odd alibi --texts my.txt --output-dir new --json",
        "unpatch odd --output-dir new --json",
        "extend odd --no-limit --output-dir new --json",
        "eval odd --texts my.txt --json",
        "bench odd --json",
        "push odd me/odd --json",
        "model-card odd",
        "plot attention odd --texts my.txt --output new.png",
    ],
)
def test_nothing_asks_without_a_terminal(tmp_path, line, monkeypatch):
    """No command asks whether to run a checkpoint's code. Transformers would prompt."""
    (tmp_path / "odd").mkdir()
    config = {"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    (tmp_path / "odd" / "odd.py").write_text("print('code of a checkpoint')")
    (tmp_path / "my.txt").write_text("one\ntwo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("asked"))
    printed, said = invoke(shlex.split(line), code=1)
    assert not printed and "Error:" in said and "execute custom code" in said and "hf-posenc --import MODULE" in said
    assert "checkpoint" not in said and not os.path.exists("new")


def flags(name):
    return {flag for parameter in COMMANDS[name].params for flag in (*parameter.opts, *parameter.secondary_opts)}


FUNCTIONS = {"push": hf_posenc.push_to_hub, "model-card": hf_posenc.model_card} | {
    name: getattr(hf_posenc, name) for name in COMMANDS if inspect.isfunction(getattr(hf_posenc, name, None))
}
FROM_THE_FOLDER = {"model", "tokenizer", "evaluation", "metadata"}
LEFT_OUT = {
    "push": FROM_THE_FOLDER | {"figures", "token"},  # a token on a command line is kept in the shell's history
    "model-card": FROM_THE_FOLDER,
    "convert": {"tokenizer", "options", "inputs"},
    "patch": {"options"},
    "extend": {"settings"},
}
"""Keyword arguments without a flag: values from the directory, batches, and settings that --option sets."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_flags_are_the_words_of_python(name):
    known = {parameter.name for parameter in COMMANDS[name].params}
    assert {*inspect.signature(FUNCTIONS[name]).parameters} - LEFT_OUT.get(name, set()) <= known
    assert not [flag for flag in flags(name) if flag.startswith("-") and "_" in flag]


DEEP = '{"type":' * 100_000  # shlex takes seconds to split it
REFUSED = [
    ("ptch bert-alibi", "Did you mean 'patch'"),
    ("extend bert-alibi --max-lenth 3", "--max-length"),
    ("patch model alibi", "Missing option"),
    *(
        (f"patch bert-base-uncased {given} --output-dir {{new}}", words)
        for given, words in (
            ("alibbi", "Unknown position encoding 'alibbi' (did you mean 'alibi'?)"),
            ("rope --option thetta=3", "has no option 'thetta' (did you mean 'theta'?)"),
            ("rope --inject every_layr", "did you mean 'every_layer'?"),
            ("rope --where encodr", "did you mean 'encoder'?"),
            ("rope --import my_encodings", "before the subcommand"),
            ("rope --option 'theta=[1, 2]'", "rope.theta=[1, 2] isn't valid. It must be a finite number above 1."),
            ("rope --option theta", "'theta' must have the form name=value"),
            ("rope --option =3", "'=3' must have the form name=value"),
            ("rope --option theta=3 --option theta=4", "'theta=4': 'theta' is set twice"),
            ("""'{"type": "rope", "theta": 3}' --option theta=4""", "'theta' is set twice"),
            *((f"rope --option {name}=3", f"'{name}' isn't an option of an encoding") for name in NO_OPTIONS),
            *((f"rope --option {name}=3", f"has no option '{name}'") for name in ("model", "encoding", "keep_original")),
            *((f"rope --{flag}{'[' * 100_000}", "is nested too deeply") for flag in WITH_VALUES),
            *((f"rope --{flag}{'9' * 5_000}", "is an integer with too many digits") for flag in WITH_VALUES),
            ("'{type: rope}'", "isn't valid JSON"),
            ("{deep}", "isn't valid JSON: it is nested too deeply"),
            ("""'{"type": "rope", "theta": 3, "theta": 4}'""", "has the entry 'theta' twice"),
            ("""'{"theta": 3}'""", "A position encoding must be a name or a dict"),
            ("alibi --inject every_layer", "'alibi' adds no vectors"),
            ("sinusoidal --inject output", "inject='output'"),
            ("alibi --max-length 0", "max_length=0"),
        )
    ),
    ("patch bert-alibi rope --output-dir {new}", "already"),
    ("extend bert-base-uncased --max-length 640 --method linar --output-dir {new}", "did you mean 'linear'?"),
    ("extend gpt2 --max-length 256 --method keep_first --option kep=3 --output-dir {new}", "did you mean 'keep'?"),
    ("extend bert-alibi --output-dir {new}", "Set --max-length, --no-limit, or --image-size"),
    (
        "extend bert-alibi --max-length 9 --no-limit --output-dir {new}",
        "--max-length 9 and --no-limit exclude each other",
    ),
    ("extend bert-alibi --max-length 9 --output-dir {new}", "max_length=9 is below the current maximum length"),
    ("extend bert-alibi --max-length 0 --output-dir {new}", "max_length=0"),
    ("extend bert-base-uncased --no-limit --output-dir {new}", "unpatched BertForMaskedLM"),
    ("inspect openai/clip-vit-base-patch32 --submodel text_modl", "did you mean 'text_model'?"),
    ("inspect openai/clip-vit-base-patch32", "submodel='text_model' or submodel='vision_model' (`--submodel`"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=lambda text: text[:60])
def test_what_is_refused(models, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(models)
    given = [DEEP if word == "{deep}" else word for word in shlex.split(line.replace("{new}", str(tmp_path / "new")))]
    done = CliRunner().invoke(app, given, prog_name="hf-posenc")
    assert done.exit_code in (1, 2) and words in " ".join(re.sub("[│╭╮╰╯]", " ", done.stderr).split()), done.stderr
    assert isinstance(done.exception, SystemExit) and not done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "environment", "shown"),
    [
        ("--debug inspect nowhere", {}, True),
        ("inspect nowhere --debug", {}, True),
        ("inspect nowhere", {"HF_POSENC_DEBUG": "1"}, True),
        ("inspect nowhere", {}, False),
        ("inspect -- --debug", {}, False),  # a name
    ],
)
def test_debug(line, environment, shown):
    """With --debug, the error is raised with its traceback. Without it, the command ends with an error message."""
    done = CliRunner(env=environment).invoke(app, shlex.split(line), prog_name="hf-posenc")
    assert isinstance(done.exception, OSError if shown else SystemExit) and done.exit_code == 1
    assert ("Error:" in done.stderr) != shown and ("--debug" in done.stderr) == line.endswith("-- --debug")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ext", "extend"),
        ("extend --over", "--overwrite"),
        ("patch folder ali", "alibi"),
        ("patch folder rope+ali", "rope+alibi"),
        ("convert folder relative_k", "relative_key relative_key_query"),
        ("patch folder rope --inject e", "every_layer"),
        ("patch folder rope --where c", "cross"),
        ("extend folder --method l", "linear llama3 longrope"),
        ("inspect fol", ""),  # the shell offers its files then
        ("convert folder rope --texts te", ""),
    ],
)
def test_completion(line, offered):
    typed = {"COMP_WORDS": f"hf-posenc {line}", "COMP_CWORD": str(len(line.split()))}
    printed, _ = invoke([], _HF_POSENC_COMPLETE="complete_bash", **typed)
    assert sorted(printed.split()) == offered.split()


def test_completion_is_installed(tmp_path, monkeypatch):
    """The script that the shell reads names the shell function that completes each command."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "hf-posenc.sh" in invoke(["--install-completion", "bash"])[0]
    script = (tmp_path / ".bash_completions" / "hf-posenc.sh").read_text()
    assert "complete -o default -F _hf_posenc_completion hf-posenc" in script and "_HF_POSENC_COMPLETE=complete_bash" in script
    assert invoke(["--show-completion", "bash"])[0].strip() == script.strip()


def test_values_of_options():
    for text, value in (
        ("1,1.5", [1, 1.5]),
        ("3,", [3]),
        ("[1, 2]", [1, 2]),
        ("[[1, 2]]", [[1, 2]]),
        ("1e3", 1000.0),
        ("true", True),
        *((text, text) for text in ("a,b", "true,1", "3::4", "1,,2", "keys+queries", "")),
    ):
        found = given_settings([f"name={text}"])["name"]
        assert found == value and type(found) is type(value)
    assert given_where("encoder, cross") == ["encoder", "cross"] and given_where("encoder") == "encoder"
    assert given_where('{"cross": "rope", "encoder": "alibi"}') == {"cross": "rope", "encoder": "alibi"}


def test_factors_of_a_rule(workplace):
    """--option takes lists as comma-separated values. The error names the expected type."""
    llama = stock("llama", "ForCausalLM")
    llama.save_pretrained("llama")
    ones, twos = (",".join([factor] * (llama.config.head_dim // 2)) for factor in ("1", "2"))
    line = f"extend llama --max-length 48 --method longrope --option short_factor={ones} --option long_factor"
    invoke(shlex.split(f"{line}={twos} --output-dir new"))
    assert hf_posenc.inspect("new").options["long_factor"] == [2.0] * (llama.config.head_dim // 2)
    error = invoke(shlex.split(f"{line}=2 --output-dir newer"), code=1)[1]
    assert "must be None or a list in which each value is a finite number above 0" in error


def test_a_part_of_a_model_is_reported_on(workplace):
    """`extend` and `patch` report on the chosen submodel of a composite model. The tokenizer follows the text model."""
    line = "extend openai/clip-vit-base-patch32 --max-length 64 --method linear --output-dir new --submodel"
    printed, _ = invoke([*shlex.split(line), "text_model"])
    assert "CLIPTextModel" in printed and maximum_length(printed) == "64 tokens"
    assert "The tokenizer's model_max_length changed from 24 to 64." in printed
    assert json.loads(invoke(["inspect", "new", "--submodel", "text_model", "--json"])[0])["max_length"] == 64
    seen = invoke(shlex.split("patch openai/clip-vit-base-patch32 alibi --submodel vision_model --output-dir seen --json"))[0]
    document = json.loads(seen)
    assert document["report"]["encoding"] == "alibi" and document["lengths"] == {} and document["needs_hf_posenc"]
    assert AutoTokenizer.from_pretrained("seen").model_max_length == 24
    back = invoke(["unpatch", "seen", "--output-dir", "back"])[0]
    assert "CLIPVisionModel" in back and "import hf_posenc" not in back


def test_lengths_are_said_in_words(workplace, monkeypatch):
    """The tokenizer is loaded once. --max_length, as in Python, is --max-length."""
    loaded = []
    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **options: loaded.append(name) or load(name, **options))
    printed, _ = invoke(shlex.split("extend bert-alibi --no-limit --output-dir new"))
    assert "model_max_length changed from 32 to unlimited." in printed and loaded == ["bert-alibi"]
    assert "`import hf_posenc` first" in printed
    printed, _ = invoke(shlex.split("patch bert-base-uncased alibi --max_length 40 --output_dir newer --json"))
    assert json.loads(printed)["lengths"] == {"model_max_length": {"before": 512, "after": 40}}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_length_of_a_sentence_transformer_comes_back(minilm, tmp_path):
    """`unpatch` restores the length of the real MiniLM, which truncates texts to 256 of its 512 tokens."""
    from sentence_transformers import SentenceTransformer

    line = ["extend", minilm, "--max-length", 1024, "--method", "dynamic", "--output-dir", tmp_path / "longer"]
    assert "max_seq_length changed from 256 to 1024." in invoke(line)[0]
    line = ["unpatch", tmp_path / "longer", "--output-dir", tmp_path / "back"]
    assert "max_seq_length changed from 1024 to 256." in invoke(line)[0]
    before, after = (SentenceTransformer(str(path), device="cpu") for path in (minilm, tmp_path / "back"))
    assert after.max_seq_length == 256
    text = ["the quick brown fox " * 90]
    assert torch.equal(before.encode(text, convert_to_tensor=True), after.encode(text, convert_to_tensor=True))


@pytest.mark.parametrize(
    "line",
    [
        "list",
        "inspect bert-alibi",
        "bench bert-base-uncased bert-alibi --length 8 --rounds 2",
        "eval gpt2 gpt2-alibi --texts my.jsonl --length 64 --count 2",
        "convert --help",
    ],
)
def test_output_on_a_terminal_that_knows_ascii(models, monkeypatch, line):
    """Results are still printed with PYTHONIOENCODING=ascii, to a log file, or on a Windows console."""
    monkeypatch.chdir(models)
    done = CliRunner(charset="ascii").invoke(app, line.split(), prog_name="hf-posenc")
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stdout and done.stdout.isascii()
    assert r"\xd7" in done.stdout or not line.startswith("bench")


def test_scripts_on_a_terminal_that_knows_ascii(monkeypatch):
    """Scripts can print any character. tests/test_options.py checks that their last lines escape unprintable characters."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    table = Table("model", box=box.HEAVY)
    table.add_row("\N{MULTIPLICATION SIGN}1.2 \N{HORIZONTAL ELLIPSIS}")
    with pytest.raises(UnicodeEncodeError):
        Console().print(table)
    terminals.set_up()
    Console().print(table)
    sys.stdout.flush()
    assert rb"\xd71.2 \u2026" in printed.getvalue()
    for other in (None, object()):
        monkeypatch.setattr(sys, "stdout", other)
        terminals.set_up()


def test_catalog_is_what_the_modules_define():
    assert catalog.catalog() == catalog.computed(), "run python -m hf_posenc.cli.catalog"


WITHOUT_TORCH = """
import sys
sys.argv = ["hf-posenc", *sys.argv[1:]]
from hf_posenc.cli import app
try:
    app(prog_name="hf-posenc")
finally:
    heavy = {"torch", "transformers", "huggingface_hub", "datasets", "matplotlib", "numpy"} & {*sys.modules}
    assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "words",
    [("--version",), ("--help",), ("list",), ("list", "--json"), ("patch", "--help"), ("plot", "--help"), ("eval", "--help")],
    ids=" ".join,
)
def test_starts_without_torch(words):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [("hf-posenc pa", "patch"), ("hf-posenc patch m ali", "alibi"), ("hf-posenc plot sim", "similarity")],
)
def test_completes_without_torch(line, expected):
    place = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_HF_POSENC_COMPLETE": "complete_bash"}
    environment = {**os.environ, **place}
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.split() == [expected], done.stderr


def test_processors_are_saved_with_the_new_image_size(tmp_path):
    """The processor of images goes with the model. Its sizes change with the model's."""
    stock("vit").save_pretrained(tmp_path / "vit")
    whole, edge = {"height": 16, "width": 16}, {"shortest_edge": 16}
    for size in (whole, edge):
        settings = {"image_processor_type": "ViTImageProcessor", "do_normalize": False, "size": size, "crop_size": whole}
        (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
        for name, flags, expected in (("extend", ("--image-size", "48"), 48), ("patch", ("alibi",), 16)):
            words = [name, tmp_path / "vit", *flags, "--output-dir", tmp_path / "new", "--overwrite"]
            shown = "".join(invoke(words))
            saved = json.loads((tmp_path / "new" / "preprocessor_config.json").read_text())
            sizes = {"size": dict.fromkeys(size, expected), "crop_size": dict.fromkeys(whole, expected)}
            assert saved == settings | sizes and "processor, so none" not in shown
