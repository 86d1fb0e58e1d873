"""The page of `hf-posenc explore`: its forms, figures, and errors, and the whole page in a real browser."""

import contextlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from functools import partial
from types import SimpleNamespace

import gradio
import httpx
import psutil
import pytest
from huggingface_hub import SpaceCard, constants
from packaging.requirements import Requirement
from typer.main import get_command
from typer.testing import CliRunner

import hf_posenc
from conftest import ROOT
from hf_posenc.cli import app
from hf_posenc.cli.arguments import given_encoding
from hf_posenc.diagnostics.registry import page_figures
from hf_posenc.encodings import canonical, checked_value, construction, encoding_class, options_of
from hf_posenc.explorer import budget, encodings, fields, gate, models, option_fields, server, work
from hf_posenc.explorer.budget import GIB, Budget, Limits, Refused
from hf_posenc.explorer.encodings import Sizes
from models import ENCODINGS, slow, stock
from tools.hosts import tiny

SMALL = Sizes(length=12, hidden_size=32, num_attention_heads=4)
NEEDED = {name: {"trained_length": 8} for name in ("fope", "logn", "self_extend")}
"""Options that are required to build an encoding without a model."""


def of_type(name):
    return {"type": name, **NEEDED.get(name, {})}


# Forms.


@pytest.mark.parametrize("name", [*ENCODINGS, "relative_key", "rope+alibi"])
def test_fields_are_the_options(name):
    parts = [encoding_class(part) for part in name.split("+")]
    options = {
        (f"{part.type}__" if parts[1:] else "") + option: annotation
        for part in parts
        for option, annotation in part.option_types().items()
        if option != "file"  # it names a file on this machine, not on a reader's
    }
    found = {field.option: field for field in option_fields.fields(name)}
    assert found.keys() == options.keys()
    for option, field in found.items():
        assert all(checked_value(option, value, options[option]) == value for value in (*field.values, field.default))


def test_what_is_written_into_a_field():
    for name, option, written, given in (
        ("sinusoidal", "base", "100", {"base": 100}),
        ("sinusoidal", "base", " 10000 ", {}),
        ("sinusoidal", "base", "", {}),
        ("sinusoidal", "bases", "10, 20", {"bases": [10, 20]}),
        ("sinusoidal", "scale", "learned", {"scale": "learned"}),
        ("alibi", "per_layer", True, {"per_layer": True}),
        ("rope", "truncate", "", {}),
        ("rope+alibi", "rope__theta", "5e5", {"rope__theta": 5e5}),
    ):
        (field,) = (field for field in option_fields.fields(name) if field.option == option)
        found = option_fields.changed({"type": name, option: 3}, field, written)
        assert found == {"type": name, **given} and canonical(found) == canonical({"type": name, **given})


# Encodings.


QUICK = ("sinusoidal", "t5", "rope", "shaw", "fope", "none", "sinusoidal+alibi")
"""One encoding of each mechanism, for `make test`."""


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in (*ENCODINGS, "sinusoidal+alibi")])
def test_figures_of_encodings(name):
    encoding = of_type(name)
    verbs = {*encoding_class(canonical(encoding)["type"]).mechanisms(options_of(canonical(encoding)))}
    found = encodings.figures(encoding, SMALL)
    vectors, scores = "embed" in verbs, bool(verbs - {"embed", "value_bias"})
    assert {*found} == {*("vectors", "waves", "similarity") * vectors, *("bias", "decay") * scores}
    assert bool(encodings.numbers(encoding, SMALL)) == bool(found)
    assert encodings.facts(encoding).startswith("### ")


def test_figures_are_of_the_options_and_sizes():
    one, other = {"type": "alibi", "sides": "one_sided"}, {"type": "rope", "theta": 100.0}
    figure = encodings.decays([one, other], SMALL)
    assert [axis.get_title() for axis in figure.axes[:2]] == ["alibi, sides=one_sided", "rope, theta=100.0"]
    maps = encodings.figures({"type": "t5"}, SMALL)["bias"].axes[:4]
    ends = [re.findall(r"[−\d.]+", axis.get_title())[1:] for axis in maps]
    bias = hf_posenc.diagnostics.similarity("t5", 12, quantity="scores", hidden_size=32, num_attention_heads=4).matrix
    for (low, high), head in zip(ends, bias, strict=True):
        assert float(low.replace("−", "-")) == pytest.approx(float(head.min()), rel=1e-2)
        assert float(high.replace("−", "-")) == pytest.approx(float(head.max()), rel=1e-2)
    assert encodings.figures({"type": "alibi"}, Sizes(12, 32, 4, True))["decay"].axes[0].get_xlim() == (-11, 0)


def test_code_gives_the_same_encoding():
    for encoding in (
        {"type": "alibi"},
        {"type": "sinusoidal", "bases": [10, 20.5]},
        {"type": "alibi", "per_layer": True},
        {"type": "rope+alibi", "rope__theta": 5e5, "alibi__slopes": "learned"},
    ):
        python, _, command = encodings.code(encoding).splitlines()
        given = eval(python.removeprefix("hf_posenc.patch(model, ").removesuffix(")"))
        words = shlex.split(command.removeprefix("# "))
        assert words[:3] == ["hf-posenc", "patch", "MODEL"] and words[-2] == "--output-dir"
        assert canonical(given) == canonical(given_encoding(words[3], words[5:-2:2])) == canonical(encoding)


# Models.


@pytest.fixture(scope="module")
def folders(tmp_path_factory, minilm):
    path = tmp_path_factory.mktemp("models")
    for kind in ("bart", "clip", "gpt2", "vit"):
        tiny.build(kind).save_pretrained(path / kind)
    hf_posenc.patch(stock("bert"), "rope").save_pretrained(path / "patched")
    (path / "minilm").symlink_to(minilm)
    return path


@pytest.mark.parametrize("kind", [slow("bart"), "clip", slow("gpt2"), "patched"])
def test_models_are_measured(folders, kind):
    subject = models.load(str(folders / kind))
    assert subject.tokenizer is None and subject.label == kind
    both = [subject, models.with_encoding(subject, {"type": "alibi", "slopes": "learned"})]
    assert both[1].label == "alibi, slopes=learned" and "alibi (slopes='learned'" in str(both[1].report())
    found = dict(models.measured(both, []))
    assert [*found] == ["probing 0", "probing 1", "numbers"] and found["numbers"].startswith(f"{kind}: ")
    assert [each.label for each in models.told_apart([subject, subject])] == [kind, f"{kind} (2)"]


@pytest.mark.slow
def test_models_on_texts(folders):
    subject = models.load(str(folders / "minilm"))
    found = dict(models.measured([subject, subject], ["The dog bit the man, and the man bit the dog."]))
    on_texts = [*page_figures("texts")]
    assert [*found] == ["probing 0", "probing 1", *on_texts, "numbers"] and {"attention", "receptive_field"} <= {*on_texts}
    assert [axis.get_title() for axis in found["attention"].axes if axis.get_title()] == ["minilm", "minilm (2)"]


def measured(*names, encoding=None, texts="", **limits):
    return list(models.shown([*names], encoding, texts, False, Limits(**limits)))


@pytest.mark.parametrize(
    ("name", "limits", "words"),
    [
        ("", {}, "No model is named. Enter a local path or a Hub ID"),
        ("./nowhere", {}, "Enter"),
        ("x" * 300, {}, "The model has 300 characters. Up to 256 are allowed."),
        ("{}/gpt2", {"max_parameters": 1000}, r"/gpt2 has [\d,]+ parameters and buffer values. .* up to 1,000. Choose"),
        ("{}/gpt2", {"model": Budget(2**16, 9)}, "needs about [0-9]+ MiB of memory. A request can use up to 0 MiB. Choose"),
    ],
)
def test_models_that_are_refused(folders, name, limits, words):
    with pytest.raises(ValueError, match=words):
        measured(name.format(folders), **limits)


MASKS = {"num_layers": 2, "attention_types": [[["global"], 2]], "max_position_embeddings": 2**16}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_layer": 10**6}, "n_layer=1,000,000. This page accepts up to 256"),
        ({"model_type": "gpt_neo", "hidden_size": 32, **MASKS}, "parameters and buffer values"),  # masks of 4 GiB
        ({"vocab_size": 10**8}, "parameters and buffer values"),
        ({"n_head": 2**9, "n_embd": 2**9, "n_layer": 255, "vocab_size": 9}, "needs about [0-9.]+ GiB of memory"),
    ],
)
def test_a_model_too_large_is_not_built(folders, tmp_path, monkeypatch, settings, words):
    config = json.loads((folders / "gpt2" / "config.json").read_text()) | settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "load", None)
    with pytest.raises(Refused, match=words):
        measured(str(tmp_path))


def test_measurements_in_pictures(folders):
    with pytest.raises(ValueError, match="ViTModel"):
        list(models.measured([models.load(str(folders / "vit"))], []))
    found = dict(measured(str(folders / "gpt2"), encoding={"type": "alibi"}))
    assert [*found] == ["reports", "probing 0", "probing 1", "numbers"]
    assert found["probing 1"].startswith("data:image/png;base64,") and found["reports"].startswith("gpt2\n")


# Models of the Hub.


def test_a_public_page_takes_no_paths(folders):
    for name in ("/etc", "/nowhere", ".", "..", "~", "./x", "a/b/c", "a--b", f"{folders}/gpt2", "", "-x", "C:\\x", "\0"):
        with pytest.raises(ValueError, match="^This page.*IDs only. Enter the.*public model"):
            measured(name, hub_only=True)


@pytest.fixture
def hub(folders, monkeypatch, tmp_path):
    """A Hub with the files of gpt2 under any name. sizes: the file sizes that it reports. fetched: the requested files."""
    found = SimpleNamespace(sizes={path.name: path.stat().st_size for path in (folders / "gpt2").iterdir()}, fetched=[])

    def info(name, files_metadata, token):
        assert files_metadata and token is False
        return SimpleNamespace(sha="0", siblings=[SimpleNamespace(rfilename=k, size=v) for k, v in found.sizes.items()])

    def download(name, file, revision, local_dir, token):
        assert token is False
        found.fetched.append(file)
        shutil.copy(folders / "gpt2" / file, local_dir)

    monkeypatch.setattr(models, "model_info", info)
    monkeypatch.setattr(models, "hf_hub_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
    monkeypatch.setattr(models.tempfile, "tempdir", str(tmp_path))
    return found


def test_a_public_page_fetches_what_it_measures(hub):
    hub.sizes |= {"adapter_config.json": 1, "onnx/model.onnx": 10**12, "pytorch_model.bin": 10**12, "x.py": 1}
    assert dict(measured("me/gpt2", hub_only=True))["reports"].startswith("gpt2\n")
    assert sorted(hub.fetched) == ["config.json", "model.safetensors"] and constants.HF_HUB_OFFLINE


def test_what_a_public_page_does_not_fetch(hub, tmp_path):
    hub.sizes["model.safetensors"] = 7 * GIB
    with pytest.raises(Refused, match="The files of me/gpt2 needs about 7.0 GiB of memory. A request.*up to 6.0 GiB"):
        measured("me/gpt2", hub_only=True)
    assert not hub.fetched
    del hub.sizes["config.json"], hub.sizes["model.safetensors"]
    with pytest.raises(ValueError, match="me/gpt2") as raised:
        measured("me/gpt2", hub_only=True)
    assert str(tmp_path) not in str(raised.value)


# Budgets.


def drawn(encoding, sizes=SMALL, memory=GIB):
    return next(encodings.shown(encoding, sizes, False, Budget(memory, 60)))


@pytest.mark.parametrize(
    "encoding",
    [
        {"type": "deberta", "max_distance": 262144},
        {"type": "shaw", "max_distance": 2**20},
        {"type": "rope+deberta", "deberta__max_distance": 262144},
    ],
    ids=lambda each: each["type"],
)
def test_an_encoding_too_large_is_not_built(monkeypatch, encoding):
    monkeypatch.setattr(construction, "with_values", None)
    with pytest.raises(ValueError, match="values of memory, but at most 16777216"):
        drawn(encoding, Sizes())


def test_pictures_of_encodings():
    found = drawn({"type": "alibi"})
    assert [*found] == ["figures", "facts", "numbers", "code"] and [*found["figures"]] == ["bias", "decay"]
    assert all(figure.startswith("data:image/png;base64,") for figure in found["figures"].values())


def long_option():
    (field,) = (field for field in option_fields.fields("sinusoidal") if field.option == "base")
    fields._written(field, {"type": "sinusoidal"}, "[" * 300)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: option_fields.fields("siusoidal"), ValueError, "Unknown position encoding 'siusoidal'"),
        (lambda: budget.checked_texts("x" * 10_001), Refused, "have 10,001 characters. Up to 10,000 are allowed."),
        (lambda: budget.checked_texts("x\n" * 17), Refused, "There are 17 texts. Up to 16"),
        (lambda: budget.checked_field("The encoding", ["x"]), Refused, "The encoding must be text, not "),
        (lambda: budget.checked_field("The encoding", {"path": "/etc/passwd"}), Refused, "must be text, not "),
        (lambda: budget.checked_field("The encoding", 3), Refused, "must be text, not "),
        (long_option, gradio.Error, "base has 300 characters"),
        (lambda: server.serve(port=70000), ValueError, "port=70000.*65535"),
        (lambda: server.serve(max_parameters=0), ValueError, "max_parameters=0"),
        (lambda: server.serve(max_memory=0), ValueError, "max_memory=0"),
        (lambda: server.serve(max_seconds=0), ValueError, "max_seconds=0"),
    ],
)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert budget.checked_texts(" a \n\n b") == ["a", "b"]


@pytest.fixture
def forked(monkeypatch):
    """Runs requests in forks of this process, which start at once and see the replacements of a test."""
    monkeypatch.setattr(work, "_context", partial(multiprocessing.get_context, "fork"))
    yield
    assert not multiprocessing.active_children()


def raises(error):
    raise error


WIDE = Budget(GIB, 60)


@pytest.mark.parametrize(
    ("function", "argument", "given", "words"),
    [
        (time.sleep, 60, Budget(GIB, 0.3), "took longer than 0.3 seconds and was stopped. Choose smaller"),
        (bytearray, GIB, Budget(GIB // 4, 60), "needed more than 0.2 GiB of memory and was stopped. Choose smaller"),
        (os._exit, 9, WIDE, r"ended early \(exit code 9\), probably for lack of memory. Choose"),
        (raises, ValueError("base=1: no"), WIDE, "^base=1: no$"),
        (raises, OSError(), WIDE, "^OSError without a message. Choose"),
        (raises, KeyError(), WIDE, "^An unexpected error occurred: KeyError: . Please report it"),
    ],
)
def test_a_spent_budget_and_errors_have_words(forked, function, argument, given, words):
    with pytest.raises(Refused, match=words):
        list(work.results(function, argument, budget=given))


def test_results_of_work(forked):
    assert list(work.results(range, 3, budget=WIDE)) == [0, 1, 2]
    some = work.results(range, 3, budget=WIDE)
    assert next(some) == 0
    some.close()
    began = time.monotonic()
    assert list(work.results(time.sleep, 60, budget=WIDE, left=lambda: True)) == [] and time.monotonic() - began < 5


def test_files_of_a_request_are_limited_and_removed(forked, tmp_path, monkeypatch):
    monkeypatch.setattr(work.tempfile, "tempdir", str(tmp_path))
    written = "import tempfile; open(tempfile.mkdtemp() + '/x', 'wb').write(bytes(2**22))"
    assert list(work.results(lambda code: exec(code) or [1], written, budget=WIDE)) == [1]
    with pytest.raises(Refused, match="File too large"):
        list(work.results(lambda code: exec(code) or [1], written, budget=Budget(2**21, 60)))
    assert not [*tmp_path.iterdir()]


def test_a_script_without_a_guard(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match='Call serve.. only under if __name__ == "__main__"'):
        work.check_main()


# Visitors.


@contextlib.contextmanager
def served(*command, **environment):
    """The address of the page that a command serves. The command is stopped afterwards."""
    settings = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}, "cwd": ROOT}
    with subprocess.Popen([sys.executable, *command], **settings) as process:
        try:
            yield re.search(r"http://\S+/", process.stdout.readline())[0]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def address():
    """The address of the page that the example of the command's help serves at a free port.

    The command runs in a fork of this process, which has already imported its libraries.
    """
    (example,) = re.findall(r"\[bold\]hf-posenc (.*)\[/\]", get_command(app).commands["explore"].help)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            warnings.simplefilter("ignore")  # those of the server's libraries
            sys.stdout = os.fdopen(writer, "w", buffering=1)
            app(example.replace("--port 8000", "--port 0").split())
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with os.fdopen(reader) as said:
            yield re.search(r"http://\S+/", said.readline())[0]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture(scope="module")
def here(address):
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", f"/gradio_api/{path}") for path in ("file=/etc/passwd", "proxy=https://x.hf.space", "upload_progress")),
        *(("POST", f"/gradio_api/{path}") for path in ("upload", "run/0", "call/draw", "component_server", "cancel")),
        *(("GET", "/monitoring"), ("PUT", "/")),
    ],
)
def test_a_page_offers_nothing_else(here, method, path):
    found = here.request(method, path, files={"files": ("x", b"x")} if method == "POST" else None)
    assert found.status_code == 403 and found.text == f"This page doesn't offer {method} on this path. Open it in a browser."


def test_a_large_request(here):
    found = here.post("/gradio_api/queue/join", content=b" " * 300_000)
    assert found.status_code == 413 and "300,000 bytes. Up to 262,144 are allowed" in found.text
    assert here.post("/gradio_api/queue/join", content=iter([b" "])).status_code == 411


def join(client, session, event, *values):
    """Adds an event of the page to its queue. event: its trigger. The number of values must match its inputs."""
    dependencies = client.get("/config").json()["dependencies"]
    (number, *_) = (
        each["id"]
        for each in dependencies
        if any(target[1] == event for target in each["targets"]) and len(each["inputs"]) == len(values) and each["backend_fn"]
    )
    body = {"data": [*values], "fn_index": number, "session_hash": session}
    return client.post("/gradio_api/queue/join", json=body)


def answers(client, session):
    """The outputs of a session's events, until the last one."""
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: ") and (message := json.loads(line[6:]))["msg"] == "process_completed":
                yield message
            elif "close_stream" in line:
                return


def test_inputs_are_no_files(here):
    for path in ("/etc/passwd", "http://127.0.0.1/x"):
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        found = join(here, "files", "submit", file, "nothing", None, "", "", False)
        assert found.status_code == 400 and "The inputs of this page are texts, numbers, and choices." in found.text
    assert here.post("/gradio_api/queue/join", content="[" * 10_000).status_code == 400


DRAWN = (None, False, 16, 32, 4, next(iter(fields.CAUSAL)))


def test_a_visitor_sees_an_encoding(here):
    assert join(here, "one", "load", *DRAWN).status_code == 200
    (answer,) = answers(here, "one")
    assert answer["success"] and "data:image/png;base64," in str(answer["output"])


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ("load", (None, False, 10**6, 32, 4, DRAWN[-1])),
        ("load", (None, False, 16, 32, 4, "nothing")),
        ("load", (None, False, 16, 33, 4, DRAWN[-1])),
        *(("submit", (path, "nothing", None, "", "", False)) for path in ("/etc", "", "x/y/z")),
        ("submit", ("x", "nothing", None, "", "y" * 20_000, False)),
    ],
)
def test_every_error_has_words(here, event, values):
    session = f"errors {event} {str(values)[:90]}"
    assert join(here, session, event, *values).status_code == 200
    (answer,) = answers(here, session)
    said = str(answer["output"].get("error") or answer["output"].get("data"))
    assert re.search(r"[A-Z'\"][^.]+ (is|are|has|have|accepts|must|no|not|exceed|doesn|isn)\b", said), answer


def test_visitors_who_leave(monkeypatch):
    now = 0.0
    monkeypatch.setattr(gate.time, "monotonic", lambda: now)
    visitors = gate.Visitors()
    left, other = visitors.left("one"), visitors.left("other")
    visitors.enter("one")
    visitors.enter("one")
    visitors.leave("one")
    now += gate.GRACE + 1
    assert not left() and other()
    visitors.leave("one")
    assert not left()
    now += gate.GRACE + 1
    assert left()


@pytest.mark.slow
@pytest.mark.parametrize("connects", [True, False], ids=["leaves", "never comes"])
def test_work_ends_when_the_visitor_leaves(folders, connects):
    code = "from hf_posenc import explorer\nif __name__ == '__main__':\n"
    code += "    page = explorer.serve(port=0, block=False); print(page.local_url, flush=True); page.block_thread()"
    with served("-c", code) as found, httpx.Client(base_url=found, timeout=60) as client:
        (server,) = (each for each in psutil.Process().children() if code in each.cmdline())

        def wait_for(working, seconds=30):
            """Waits until there are a forkserver, its resource tracker, and, if working, a request."""
            end = time.monotonic() + seconds
            while (len(server.children(recursive=True)) > 2) != working:
                assert time.monotonic() < end, server.children(recursive=True)
                time.sleep(0.02)

        (answer,) = join(client, "first", "load", *DRAWN) and answers(client, "first")
        wait_for(False)
        long = (str(folders / "minilm"), "nothing", None, "", "\n".join(["many words of this"] * 16), False)
        assert join(client, "long", "submit", *long).status_code == 200
        if connects:
            with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": "long"}) as stream:
                lines = stream.iter_lines()  # closes the connection when it is deleted
                next(lines)
                wait_for(True)
        else:
            wait_for(True)
        wait_for(False, gate.GRACE + 3)


def test_pages_that_others_reach(monkeypatch):
    for name in ("GRADIO_SERVER_NAME", "SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not any(server._is_public(host) for host in (None, "127.0.0.2", "::1", "localhost"))
    assert all(server._is_public(host) for host in ("0.0.0.0", "::", "example.org"))
    for name, value in (("GRADIO_SERVER_NAME", "0.0.0.0"), ("SPACE_ID", "me/x")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert server._is_public(None)


# Serving.


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["explore", "--no-browser", "--port", str(port)])
    assert done.exit_code == 1
    assert f"Port {port} of 127.0.0.1 isn't available (Address already in use)" in done.stderr


def test_without_gradio(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hf_posenc.explorer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(hf_posenc, "explorer")
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(app, ["explore", "--no-browser"])
    assert done.exit_code == 1 and "pip install" in done.stderr


def test_the_space():
    folder = ROOT / "tools" / "space"
    card = SpaceCard.load(folder / "README.md").data
    assert card.sdk == "gradio" and (folder / card.app_file).is_file() and len(card.short_description) <= 60
    assert Requirement(f"gradio=={card.sdk_version}").specifier.contains(gradio.__version__)
    assert (folder / "requirements.txt").read_text() == "hf-posenc[explore]\n"


# In a browser.


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
PATIENCE = 60_000
"""In milliseconds: the maximum time that a browser waits for an element on a busy machine."""
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium, address):
    """The page in an open window. Afterwards, the page must have made no external requests and logged no errors or warnings."""
    window, complaints, elsewhere = chromium.new_page(), [], []
    window.set_default_timeout(PATIENCE)
    window.on("pageerror", lambda error: complaints.append(str(error)))
    window.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    here = (address, "data:", "blob:")
    window.on("request", lambda request: None if request.url.startswith(here) else elsewhere.append(request.url))
    window.goto(address)
    yield window
    window.close()
    assert not complaints and not elsewhere


def choose(window, label, name):
    box = window.get_by_role("tabpanel").filter(visible=True).get_by_label(label, exact=True).first
    box.click()
    box.fill(name)
    box.press("Enter")


def sees(window, *captions):
    """Waits until exactly these figures are visible."""
    from playwright.sync_api import expect

    images = window.locator("img").filter(visible=True)
    expect(images).to_have_count(len(captions))
    for caption in captions:
        expect(window.get_by_text(caption, exact=True).filter(visible=True)).not_to_have_count(0)
    for image in images.all():
        expect(image).to_have_js_property("complete", True)
        assert image.evaluate("image => image.naturalWidth") > 300


@pytest.mark.slow
@in_a_browser
def test_an_encoding_and_its_options(tab):
    sees(tab, "Vectors", "Some columns of the vectors", "Dot products of the vectors")
    choose(tab, "Encoding", "alibi")
    sees(tab, "By distance", "Scores by query and key")
    tab.get_by_role("button", name="Options").first.click()
    choose(tab, "sides", "one_sided")
    tab.get_by_text("--option sides=one_sided").wait_for()
    sees(tab, "By distance", "Scores by query and key")
    choose(tab, "Encoding", "rope+alibii")
    tab.get_by_text("Unknown position encoding 'alibii' (did you mean 'alibi'?)").wait_for()
    sees(tab)
    choose(tab, "Encoding", "rope+alibi")
    box = tab.get_by_label("rope__theta")
    box.fill("1")
    box.press("Enter")
    tab.get_by_text("theta=1 isn't valid. It must be a finite number above 1.").wait_for()
    box.fill("500")
    box.press("Tab")
    tab.get_by_text("--option rope__theta=500").wait_for()
    sees(tab, "By distance", "Scores by query and key")
    choose(tab, "Encoding", "none")
    tab.get_by_text("there is nothing to draw").wait_for()


@pytest.mark.slow
@in_a_browser
def test_two_encodings_and_the_theme(tab, address):
    from playwright.sync_api import expect

    tab.goto(f"{address}?__theme=dark")
    expect(tab.locator("#dark input")).to_be_checked()
    tab.get_by_role("tab", name="Two encodings").click()
    sees(tab, "By distance, side by side", "Scores by query and key", "Scores by query and key")
    choose(tab, "Second", "learned")
    vectors = ("Vectors", "Some columns of the vectors", "Dot products of the vectors")
    sees(tab, "By distance, side by side", "Scores by query and key", *vectors)
    corner = "image => { const c = document.createElement('canvas').getContext('2d'); c.drawImage(image, 0, 0); "
    corner += "return [...c.getImageData(2, 2, 1, 1).data.slice(0, 3)] }"
    image = tab.locator("img").filter(visible=True).first
    assert max(image.evaluate(corner)) < 60
    tab.locator("#dark input").uncheck()
    tab.wait_for_function(
        f"[...document.querySelectorAll('img')].filter(i => i.checkVisibility()).every(i => Math.min(...({corner})(i)) > 200)"
    )


@pytest.mark.slow
@in_a_browser
def test_a_model_and_what_is_beside_it(tab, folders):
    tab.get_by_role("tab", name="A model").click()
    name, measure = tab.locator("#model input, #model textarea"), tab.get_by_role("button", name="Measure")
    name.fill(str(folders / "minilm"))
    tab.get_by_label("the same model with another encoding").check()
    measure.click()
    identical = "Attention among identical words"
    alone = f"{identical}, where position alone decides"
    captions = (alone, f"{alone}: the other model")
    on_texts = [figure.caption for figure in page_figures("texts").values()]
    tab.get_by_label("In numbers").filter(visible=True).wait_for()
    sees(tab, *captions, *on_texts)
    tab.get_by_label("another model").check()
    tab.locator("#other input, #other textarea").fill(str(folders / "nothing"))
    measure.click()
    tab.get_by_text(f"There is no folder {folders / 'nothing'}").wait_for()
    sees(tab)


@pytest.mark.slow
@in_a_browser
def test_the_space_serves_the_page(chromium):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"import runpy; print('http://127.0.0.1:{port}/', flush=True); "
    code += "runpy.run_path('tools/space/app.py', run_name='__main__')"
    with served("-c", code, GRADIO_SERVER_PORT=str(port)) as address:
        window = chromium.new_page()
        for _ in range(60):
            with contextlib.suppress(Exception):
                window.goto(address)
                break
            time.sleep(1)
        sees(window, "Vectors", "Some columns of the vectors", "Dot products of the vectors")
        window.close()
