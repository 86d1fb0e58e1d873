"""The page of `hf-posenc explore`: its forms, what it shows, its errors, and all of it in a real browser."""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time

import pytest
from huggingface_hub import SpaceCard
from packaging.requirements import Requirement
from typer.main import get_command
from typer.testing import CliRunner

import hf_posenc
from conftest import ENCODINGS, ROOT, stock
from hf_posenc.cli import app
from hf_posenc.cli.arguments import given_encoding
from hf_posenc.encodings import canonical, checked_value, encoding_class
from hosts import tiny

gradio = pytest.importorskip("gradio")
from hf_posenc.explorer import encodings, forms, models, serving  # noqa: E402
from hf_posenc.explorer.encodings import Sizes  # noqa: E402

SMALL = Sizes(length=12, hidden_size=32, num_attention_heads=4)
NEEDED = {name: {"trained_length": 8} for name in ("fope", "logn", "self_extend")}
"""Options without which an encoding can't be built apart from a model."""


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
        if option != "file"  # of this machine: none of a reader's
    }
    fields = {field.option: field for field in forms.fields(name)}
    assert fields.keys() == options.keys()
    for option, field in fields.items():
        for value in (*field.values, field.default):
            assert checked_value(option, value, options[option]) == value


@pytest.mark.parametrize(
    ("name", "option", "written", "given"),
    [
        ("sinusoidal", "base", "100", {"base": 100}),
        ("sinusoidal", "base", " 10000 ", {}),
        ("sinusoidal", "base", "", {}),
        ("sinusoidal", "bases", "10, 20", {"bases": [10, 20]}),
        ("sinusoidal", "scale", "learned", {"scale": "learned"}),
        ("alibi", "per_layer", True, {"per_layer": True}),
        ("rope", "truncate", "", {}),
        ("rope+alibi", "rope__theta", "5e5", {"rope__theta": 5e5}),
    ],
)
def test_what_is_written_into_a_field(name, option, written, given):
    (field,) = (field for field in forms.fields(name) if field.option == option)
    found = forms.changed({"type": name, option: 3}, field, written)
    assert found == {"type": name, **given}
    assert canonical(found) == canonical({"type": name, **given})


def test_unknown_names_have_no_fields():
    with pytest.raises(ValueError, match="unknown position encoding 'siusoidal'"):
        forms.fields("siusoidal")


# Encodings.


@pytest.mark.parametrize("name", [*ENCODINGS, "sinusoidal+alibi"])
def test_figures_of_encodings(name):
    encoding = of_type(name)
    vectors, scores = encodings.ways(encoding)
    found = encodings.figures(encoding, SMALL)
    assert [*found] == [*("vectors", "waves", "similarity") * vectors, *("bias", "decay") * scores]
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


@pytest.mark.parametrize(
    "encoding",
    [
        {"type": "alibi"},
        {"type": "sinusoidal", "bases": [10, 20.5]},
        {"type": "alibi", "per_layer": True},
        {"type": "rope+alibi", "rope__theta": 5e5, "alibi__slopes": "learned"},
    ],
)
def test_code_gives_the_same_encoding(encoding):
    python, _, command = encodings.code(encoding).splitlines()
    given = eval(python.removeprefix("hf_posenc.patch(model, ").removesuffix(")"))
    words = shlex.split(command.removeprefix("# "))
    assert words[:3] == ["hf-posenc", "patch", "MODEL"] and words[-2] == "--output-dir"
    of_command = given_encoding(words[3], words[5:-2:2])
    assert canonical(given) == canonical(of_command) == canonical(encoding)


# Models.


@pytest.fixture(scope="module")
def folders(tmp_path_factory, minilm):
    path = tmp_path_factory.mktemp("models")
    for kind in ("bart", "clip", "gpt2", "vit"):
        tiny.build(kind).save_pretrained(path / kind)
    hf_posenc.patch(stock("bert"), "rope").save_pretrained(path / "patched")
    (path / "minilm").symlink_to(minilm)
    return path


@pytest.mark.parametrize("kind", ["bart", "clip", "gpt2", "patched"])
def test_models_are_measured(folders, kind):
    subject = models.load(str(folders / kind))
    assert subject.tokenizer is None and subject.label == kind
    both = [subject, models.with_encoding(subject, {"type": "alibi", "slopes": "learned"})]
    assert both[1].label == "alibi, slopes=learned" and "alibi (slopes='learned'" in str(both[1].report())
    found = dict(models.measured(both, []))
    assert [*found] == ["probing 0", "probing 1", "numbers"]
    assert found["numbers"].splitlines()[0] == kind


def test_two_models_of_one_name(folders):
    subject = models.load(str(folders / "gpt2"))
    assert [each.label for each in models.told_apart([subject, subject])] == ["gpt2", "gpt2 (2)"]


@pytest.mark.slow
def test_models_on_texts(folders):
    subject = models.load(str(folders / "minilm"))
    found = dict(models.measured([subject, subject], ["The dog bit the man, and the man bit the dog."]))
    assert [*found] == ["probing 0", "probing 1", "attention", "receptive_field", "numbers"]
    assert [axis.get_title() for axis in found["attention"].axes if axis.get_title()] == ["minilm", "minilm (2)"]


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("", None, "no model is named: give a folder"),
        ("./nowhere", None, "there is no folder ./nowhere"),
        ("{}/gpt2", 1000, r"/gpt2 has [\d,]+ parameters, and this page takes models of up to 1,000: take a smaller one"),
    ],
)
def test_models_that_are_refused(folders, name, limit, words):
    with pytest.raises(ValueError, match=words):
        models.load(name.format(folders), **{"max_parameters": limit} if limit else {})


def test_a_model_too_large_is_not_read(folders, tmp_path):
    shutil.copy(folders / "gpt2" / "config.json", tmp_path)  # without weights
    with pytest.raises(ValueError, match="takes models of up to 10"):
        models.load(str(tmp_path), 10)


def test_models_that_read_no_text(folders):
    with pytest.raises(ValueError, match="ViTModel reads no tokens"):
        list(models.measured([models.load(str(folders / "vit"))], []))


# Serving.


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["explore", "--no-browser", "--port", str(port)])
    assert done.exit_code == 1
    assert f"port {port} of 127.0.0.1 can't be had (Address already in use): give another one, or 0 for" in done.stderr


def test_ports_that_there_are_not():
    with pytest.raises(ValueError, match="port=70000: allowed is 1 to 65535"):
        serving.serve(port=70000)


def test_without_gradio(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hf_posenc.explorer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(hf_posenc, "explorer")
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(app, ["explore", "--no-browser"])
    assert done.exit_code == 1 and 'pip install "hf-posenc[explore]"' in done.stderr


def test_the_space():
    folder = ROOT / "scripts" / "space"
    card = SpaceCard.load(folder / "README.md").data
    assert card.sdk == "gradio" and (folder / card.app_file).is_file() and len(card.short_description) <= 60
    assert Requirement(f"gradio=={card.sdk_version}").specifier.contains(gradio.__version__)
    assert (folder / "requirements.txt").read_text() == "hf-posenc[explore]\n"


# In a browser.


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
PATIENCE = 60_000
"""In milliseconds: how long a browser waits for what it should see on a busy machine."""
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@contextlib.contextmanager
def served(*command, **environment):
    """The address of the page that a command serves, which is ended afterwards."""
    settings = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}, "cwd": ROOT}
    with subprocess.Popen([sys.executable, *command], **settings) as process:
        try:
            yield re.search(r"http://\S+/", process.stdout.readline())[0]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def address():
    """Served by the example of the command's help, at a free port."""
    (example,) = re.findall(r"\[bold\]hf-posenc (.*)\[/\]", get_command(app).commands["explore"].help)
    with served("-m", "hf_posenc.cli", *example.replace("--port 8000", "--port 0").split()) as found:
        yield found


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
    """The page in a window, open. Afterwards: it has asked for nothing from elsewhere, and complained of nothing."""
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
    """Waits until these figures are seen, and no others."""
    from playwright.sync_api import expect

    images = window.locator("img").filter(visible=True)
    expect(images).to_have_count(len(captions))
    for caption in captions:
        expect(window.get_by_text(caption, exact=True).filter(visible=True)).not_to_have_count(0)
    for image in images.all():
        expect(image).to_have_js_property("complete", True)
        assert image.evaluate("image => image.naturalWidth") > 300


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
    tab.get_by_text("unknown position encoding 'alibii' (did you mean 'alibi'?)").wait_for()
    sees(tab)
    choose(tab, "Encoding", "rope+alibi")
    box = tab.get_by_label("rope__theta")
    box.fill("1")
    box.press("Enter")
    tab.get_by_text("theta=1: allowed is a finite number above 1").wait_for()
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
    captions = (f"{identical}, where position alone decides", f"{identical} in what is beside it")
    on_texts = ("Attention by distance, on the texts", "How far away the tokens are on which a state depends")
    tab.get_by_label("In numbers").filter(visible=True).wait_for()
    sees(tab, *captions, *on_texts)
    tab.get_by_label("another model").check()
    tab.locator("#other input, #other textarea").fill(str(folders / "nothing"))
    measure.click()
    tab.get_by_text(f"there is no folder {folders / 'nothing'}").wait_for()
    sees(tab)


@pytest.mark.slow
@in_a_browser
def test_the_space_serves_the_page(chromium):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"import runpy; print('http://127.0.0.1:{port}/', flush=True); "
    code += "runpy.run_path('scripts/space/app.py', run_name='__main__')"
    with served("-c", code, GRADIO_SERVER_PORT=str(port)) as address:
        window = chromium.new_page()
        for _ in range(60):
            with contextlib.suppress(Exception):
                window.goto(address)
                break
            time.sleep(1)
        sees(window, "Vectors", "Some columns of the vectors", "Dot products of the vectors")
        window.close()
