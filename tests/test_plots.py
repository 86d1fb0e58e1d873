"""Figures: their content in both themes, without overlaps, and the command that draws them."""

import functools
import itertools
import json
import math
import os
import re
import shlex
import sys
import threading
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.artist import Artist
from matplotlib.colors import to_hex
from matplotlib.text import Text
from transformers import BertTokenizer
from typer import Typer
from typer.testing import CliRunner

import hf_posenc
from benchmarks import figures as speed_figures
from conftest import ROOT
from experiments import length_figures
from hf_posenc import diagnostics, plots
from hf_posenc.cli import app
from hf_posenc.cli.figures import _command
from hf_posenc.diagnostics import figures as style
from hf_posenc.diagnostics import registry
from models import shared, slow, stock

RESULTS = ROOT / "scripts" / "results"
PAGE = (ROOT / "docs" / "guides" / "analyze.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"!\[[^\]]*\]\(\.\./images/(\w+)\.png\)\n\n```python\n(.*?)```", PAGE, re.S))
SLOW = ("attention", "bias", "decay", "probing")
"""Figures of many panels, which take longest."""


def record(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def lines(axis):
    """Label -> the values of a line in a panel."""
    return {line.get_label(): line.get_ydata() for line in axis.lines}


def titles(figure):
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


def image(axis):
    return np.ma.filled(axis.images[0].get_array().astype(float), np.nan)


# Each figure of the page: legible, complete, in both themes.


@pytest.fixture(scope="module")
def page():
    """Name of a picture -> the figure of its block in docs/guides/analyze.md, light or dark."""
    model = shared("bert", None)
    texts = torch.randint(1, 20, (3, 20), generator=torch.Generator().manual_seed(0))
    names = {"json": json, "Path": Path, "diagnostics": diagnostics, "plots": plots, "tokenizer": None}
    names |= {"model": model, "patched": shared("bert", "alibi"), "texts": texts}

    @functools.cache
    def figure(name, dark=False):
        code = re.sub(r"^plots\.", "figure = plots.", BLOCKS[name], flags=re.MULTILINE)
        for old, new in (
            ("scripts/results", str(RESULTS)),
            ("length=32", "length=16"),
            ("targets=8", "targets=4"),
            (f'path="{name}.png"', f"dark={dark}"),
        ):
            code = code.replace(old, new)
        exec(code, space := dict(names))
        return space["figure"]

    return figure


def texts_of(figure):
    """The visible texts, with their extents in pixels."""
    figure.draw_without_rendering()
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axis in filter(Artist.get_visible, figure.axes):
        found += axis.texts
        if axis.axison:
            found += [axis.title, axis.xaxis.label, axis.yaxis.label]
            found += axis.get_legend().get_texts() if axis.get_legend() else []
            # Only the ticks within the axis are drawn.
            ticks = [tick for each in (axis.xaxis, axis.yaxis) for tick in each._update_ticks()]
            found += [label for tick in ticks for label in (tick.label1, tick.label2)]
    shown = [text for text in found if text.get_text() and text.get_visible()]
    return [(text, text.get_window_extent(figure._get_renderer())) for text in shown]


@pytest.mark.parametrize("name", BLOCKS)
def test_labels_neither_overlap_nor_are_cut(page, name):
    figure = page(name)
    texts, boxes = zip(*texts_of(figure), strict=True)
    assert len(texts) > 4
    low, high = (np.array([getattr(box, corner) for box in boxes]) for corner in ("min", "max"))
    cut = ((low < -1) | (high > figure.bbox.size + 1)).any(-1)
    assert not cut.any(), [text.get_text() for text, each in zip(texts, cut, strict=True) if each]
    both = (np.minimum(high[:, None], high) - np.maximum(low[:, None], low) >= 1).all(-1)
    overlaps = np.argwhere(np.triu(both, 1))
    assert not len(overlaps), [(texts[one].get_text(), texts[other].get_text()) for one, other in overlaps]


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in BLOCKS])
def test_the_dark_theme_is_readable(page, name):
    figure = page(name, dark=True)
    for text in figure.findobj(Text):
        if text.get_text() and not (text.axes and text.axes.images):  # the color of a text in a cell suits the cell
            assert contrast(to_hex(text.get_color()), style.DARK.paper) > 4.5, text.get_text()
    assert {to_hex(each.get_facecolor()) for each in (figure, *figure.axes)} == {style.DARK.paper}


def test_the_page():
    """Each function has one picture, and none is too large."""
    pictures = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "images").glob("*.png")}
    assert {*BLOCKS} <= {*pictures} and sum(pictures[name] for name in BLOCKS) < 1.5e6
    drawn = [re.search(r"plots\.(\w+)\(", code)[1] for code in BLOCKS.values()]
    assert sorted(drawn) == plots.__all__


# The palette: contrast, and the distance of any two colors for readers with color vision deficiencies.

CONES = {
    "all": np.eye(3),
    "no long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no middle": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Machado, Oliveira, and Fernandes (2009), severity 1.0: linear RGB -> linear RGB."""


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """WCAG 2."""
    low, high = sorted(linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    """CIE L*a*b* of linear RGB."""
    matrix = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x, y, z = np.cbrt(np.clip(matrix @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883], 0.008856, None))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_the_palette(theme):
    assert all(contrast(colour, theme.paper) > 2.3 for colour in theme.lines)
    assert contrast(theme.ink, theme.paper) > 12 and contrast(theme.quiet, theme.paper) > 4.5
    for cones in CONES.values():
        seen = [lab(cones @ linear(colour)) for colour in theme.lines]
        assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 10


def test_no_colour_alone_tells_lines_apart():
    sheet = style.Sheet((3, 3))
    dashes = [sheet.line(place) for place in range(18)]
    markers = [sheet.line(place, markers=True) for place in range(18)]
    assert len({str(each["linestyle"]) for each in dashes[:6]}) == 6 == len({each["marker"] for each in markers[:6]})
    assert len({str(each) for each in dashes}) == len({str(each) for each in markers}) == 18


# Content of figures.


def sine(position, pair, size=32, base=10000.0):
    return math.sin(position / base ** (2 * pair / size))


def test_vectors_and_waves():
    drawn = image(plots.vectors("sinusoidal", length=6, hidden_size=4).axes[0])
    assert drawn.shape == (6, 4)
    assert drawn[5] == pytest.approx([math.sin(5), math.cos(5), math.sin(0.05), math.cos(0.05)])
    figure = plots.waves(columns=[0, 8], length=9)
    for axis, column in zip(figure.axes, (0, 8), strict=True):
        assert axis.lines[-1].get_ydata() == pytest.approx([sine(position, column // 2) for position in range(9)])
        assert axis.texts[0].get_text() == f"column {column}"


def test_similarity():
    figure = plots.similarity({"type": "counter"}, length=4, hidden_size=2)
    left, right = figure.axes[:2]
    assert image(left).tolist() == [[i * j for j in range(4)] for i in range(4)]
    (mean,) = [line for line in right.lines if line.get_label() == "mean"]
    # By distance: products of 0·1, 1·2, 2·3, and so on.
    assert dict(zip(mean.get_xdata(), mean.get_ydata(), strict=True)) == pytest.approx(
        {-3: 0, -2: 1.5, -1: 8 / 3, 0: 3.5, 1: 8 / 3, 2: 1.5, 3: 0}
    )
    band = right.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == 9 and band[:, 1].min() == 0


def test_the_binary_counter():
    left, right = plots.counter(bits=3).axes[:2]
    assert ["".join(str(int(bit)) for bit in row) for row in image(left)] == [f"{number:03b}" for number in range(8)]
    assert image(right)[5] == pytest.approx([math.sin(5 / 4), math.sin(5 / 2), math.sin(5)])
    assert [label.get_text() for label in right.get_xticklabels()] == ["25", "13", "6"]  # 2π·4, 2π·2, 2π


def test_the_criteria():
    """A counter isn't bounded. A fraction of the length has another step in each text. A table has a maximum length."""
    figure = plots.criteria(["counter", "normalized", "sinusoidal", "learned"])
    curves, marks = figure.axes[:3], figure.axes[3:]
    lengths = [8, 16, 32, 64, 128, 256, 512]
    unique, step, largest = ([line.get_ydata() for line in axis.lines] for axis in curves)
    assert unique[0] == pytest.approx([1] * 7) and largest[0] == pytest.approx([length - 1 for length in lengths])
    assert step[1] == pytest.approx([1 / (length - 1) for length in lengths]) and largest[1] == pytest.approx([1] * 7)
    apart = math.sqrt(sum(2 - 2 * math.cos(10000 ** (-pair / 32)) for pair in range(32)))
    assert step[2] == pytest.approx([apart] * 7) == unique[2]
    assert np.isnan(largest[3]).tolist() == [False] * 4 + [True] * 3
    assert ["".join(text.get_text() for text in axis.texts[::2]) for axis in marks] == ["✓✓✓✓", "✓✗✓✓", "✗✓✓✗"]


def test_bias_maps():
    figure = plots.bias("alibi", length=4, num_attention_heads=2, causal=True)
    for axis, slope in zip(figure.axes[:2], (2**-4, 2**-8), strict=True):
        expected = [[-slope * (i - j) if j <= i else math.nan for j in range(4)] for i in range(4)]
        assert np.array_equal(image(axis), expected, equal_nan=True)
        assert axis.images[0].get_clim() == (-3 * 2**-4, 0)  # one scale for all heads
    # Hidden keys have no color. A color for them would make all others look alike.
    one_sided = plots.bias({"type": "alibi", "sides": "one_sided"}, length=4, num_attention_heads=2)
    assert np.isnan(image(one_sided.axes[0])[0, 1:]).all() and np.isnan(image(one_sided.axes[1])[3, :3]).all()
    # For an encoding that both rotates and biases, the figure shows the sum, a score.
    own = diagnostics.Similarity("own", "scores", torch.zeros(1, 2, 2), None)
    for encoding, heading, scale in (
        ({"type": "alibi", "per_layer": True}, "alibi, per_layer=True: bias", "added to the score"),
        ("rope+alibi", "rope+alibi: score", "score"),
        (own, "own: bias", "added to the score"),
    ):
        sizes = {} if encoding is own else {"length": 4, "num_attention_heads": 2}
        figure = plots.bias(encoding, **sizes)
        assert (figure.get_suptitle(), figure.axes[-1].get_ylabel()) == (heading, scale)


def test_decay_side_by_side():
    found = diagnostics.decay("alibi", 5, hidden_size=16, num_attention_heads=4)
    figure = plots.decay([found, "rope", {"type": "sinusoidal", "base": 9}], length=5, num_attention_heads=4, hidden_size=16)
    alibi, rope, sinusoidal = figure.axes
    assert lines(alibi)["head 0"] == pytest.approx([-0.25 * abs(distance) for distance in range(-4, 5)])
    assert lines(alibi)["head 3"] == pytest.approx([-(2**-8) * abs(distance) for distance in range(-4, 5)])
    # Two pairs of features, all 1: a pair's product is 2 cos(distance · frequency), and the scaling is 1/2.
    expected = [(2 * math.cos(d) + 2 * math.cos(d / 100)) / 2 for d in range(-4, 5)]
    assert lines(rope)["all heads"] == pytest.approx(expected)
    assert lines(sinusoidal)["all heads"] == pytest.approx(
        [sum(math.cos(d * 9 ** (-pair / 8)) for pair in range(8)) for d in range(-4, 5)]
    )
    assert titles(figure) == ["alibi", "rope", "sinusoidal, base=9.0"]
    assert all(axis.get_ylim()[0] <= 0 <= axis.get_ylim()[1] for axis in figure.axes)


def test_a_trained_module_is_drawn_as_it_is():
    model = hf_posenc.patch(stock("bert"), "alibi", slopes="learned")
    encoding = model.posenc
    with torch.no_grad():
        encoding.weight.copy_(torch.arange(1.0, len(encoding.weight) + 1))
    figure = plots.decay([encoding], length=3)
    assert lines(figure.axes[0])["head 0"] == pytest.approx([-2, -1, 0, -1, -2])
    assert titles(figure) == ["alibi, slopes=learned"]


# Figures of models.


def test_probing(page):
    figure = page("probing")
    found = diagnostics.probing(shared("bert"), length=16)
    maps = [axis for axis in figure.axes if axis.images][: found.attention.shape[0] * found.attention.shape[1]]
    for axis, (layer, head) in zip(maps, np.ndindex(*found.attention.shape[:2]), strict=True):
        assert np.allclose(image(axis), found.attention[layer, head])
        assert axis.get_title().endswith(f"{found.strength[layer, head]:.2f}")
    with pytest.raises(ValueError, match="layers=9"):
        plots.probing(found, layers=[9])


def by_distance(weights):
    distances = tuple(range(-1, 2))
    pairs, mean = (3, 4, 3), torch.tensor([[0.5, 1.5]], dtype=torch.float64)
    return diagnostics.AttentionByDistance(
        "BertModel", 1, 4, distances, pairs, torch.tensor(weights, dtype=torch.float64), mean
    )


def test_attention_by_distance():
    one, other = by_distance([[[0.1, 0.5, 0.2], [0.3, 0.1, 0.4]]]), by_distance([[[0.2, 0.2, 0.2], [0.2, 0.2, 0.2]]])
    figure = plots.attention({"one": one, "other": other})
    left, right, below = figure.axes[:3]
    assert lines(left)["layer 0"] == pytest.approx([0.2, 0.3, 0.3]) and lines(below)["layer 0"] == pytest.approx([0.2] * 3)
    assert image(right).tolist() == [[0.5, 1.5]] and [text.get_text() for text in right.texts] == ["0", "2"]


def test_receptive_field_and_length_curve():
    share = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1], dtype=torch.float64)
    cumulative = torch.tensor([0.4, 0.8, 1.0], dtype=torch.float64)
    found = diagnostics.ReceptiveField("A", 1, "middle", (-2, -1, 0, 1, 2), share, cumulative, (0.5, 0.9), (1, 2))
    left, right = plots.receptive_field(found).axes
    assert left.lines[0].get_ydata() == pytest.approx(share.tolist())
    assert right.lines[0].get_ydata() == pytest.approx([0.4, 0.8, 1])
    assert [text.get_text() for text in right.texts] == ["50% within 1", "90% within 2"]
    curves = [
        diagnostics.LengthCurve("A", 2, 4, measure, (8, 16), (2.5, 3.5), (0.1, 0.2), torch.zeros(2, 2))
        for measure in ("loss", "cosine")
    ]
    (axis,) = plots.length_curve({"a": curves[0]}).axes
    assert axis.lines[0].get_xydata().tolist() == [[8, 2.5], [16, 3.5]] and axis.get_ylabel() == "loss, nats per token"
    assert [segment.tolist() for segment in axis.collections[0].get_segments()][1] == [[16, 3.3], [16, 3.7]]
    with pytest.raises(ValueError, match="measured by cosine and loss"):
        plots.length_curve({"a": curves[0], "b": curves[1]})


# Figures of records.


def test_lengths():
    given = record("length-linux-doc-6.1")
    figure = length_figures.lengths(given)
    above, _, below = figure.axes[:3]
    truncated = [given["scores"]["title"][str(length)]["minilm, truncated at 512"]["mrr"] for length in (256, 512, 1024)]
    assert above.lines[0].get_ydata() == pytest.approx(truncated)
    t5 = given["differences"]["title"]["1024"]["minilm-t5"]
    segments = [segment.tolist() for bars in below.collections for segment in bars.get_segments()]
    assert any([low, high] == pytest.approx(t5["interval"]) for (_, low), (_, high) in segments)
    legend = [
        "minilm, truncated at 512",
        "minilm, chunked by 512, mean",
        "calibrated",
        "minilm-relative",
        "minilm-t5",
        "chance",
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == legend


def test_perplexity_by_length():
    """The baseline has the ratio 1."""
    each = {"perplexity_interval": [1, 9], "window": 8, "documents": 3}
    models = {
        "a": {"perplexity": 4.0, "ratio": 1.0, "ratio_interval": [1.0, 1.0], **each},
        "b": {"perplexity": 5.0, "ratio": 1.25, "ratio_interval": [1.2, 1.3], **each},
    }
    settings = {"models": ["a", "b"], "baseline": "a", "perplexity_baseline": "a"}
    given = {"settings": settings, "chance": {}, "scores": {}, "differences": {}, "heat": {}}
    above, below = length_figures.lengths({**given, "perplexity": {"16": models, "8": models}}).axes
    assert above.lines[1].get_xydata().tolist() == [[8, 5], [16, 5]]
    assert below.lines[0].get_ydata().tolist() == [1.25, 1.25]


def test_needles():
    given = record("needle")
    figure = length_figures.needle(given)
    shown = ["minilm truncated at 512", "minilm averaged chunk embeddings", "minilm-relative"]
    assert [title.replace("\n", " ") for title in titles(figure)] == shown
    heat = given["heat"]["minilm-relative"]
    expected = [[heat[str(2**k)][part]["score"]["recall_at_1"] for k in range(7, 13)] for part in range(5)]
    assert image(figure.axes[2]).tolist() == expected
    assert figure.axes[2].texts[6].get_text() == f"{expected[1][0]:.2f}"
    assert "n = 12 per cell" in figure.axes[-1].get_ylabel()
    assert all([*line.get_xdata()] == [2.5, 2.5] for axis in figure.axes[:3] for line in axis.lines)  # beyond 512 tokens


def test_few_methods_are_shown():
    ways = ("truncated at 24", "chunked by 24, mean", "chunked by 24, max")
    names = ["bag of words", *(f"stock, {way}" for way in ways), "alibi", *(f"other, {way}" for way in ways)]
    shown = length_figures.shown(names, ["stock", "alibi", "other"], names[1])
    assert shown == [names[1], names[2], "alibi", "other, truncated at 24"]


def test_bench():
    given = record("bench")
    figure = speed_figures.bench(given)
    (axis,) = [axis for axis in figure.axes if axis.get_title() == "attention alone, forward, float32"]
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[0] == "none" and "stock" not in names
    points = {tuple(point) for line in axis.lines for point in np.round(line.get_xydata(), 6).tolist()}
    ratio = given["groups"]["attention-2048-fp32"]["subjects"]["shaw"]["ratios"]["stock"][0]
    assert (round(ratio, 6), names.index("shaw")) in points  # the middle one of three lengths


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: length_figures.lengths({"groups": {}}), "scripts/eval_length.py: it has no 'settings'"),
        (lambda: length_figures.needle([1]), "it is a list"),
        (lambda: length_figures.needle(record("length-linux-doc-6.1")), "no needles"),
        (lambda: speed_figures.bench(record("needle")), "a record of scripts/bench.py"),
        (lambda: speed_figures.bench({"groups": {}}), "none of the groups forward, train, attention"),
        (lambda: plots.waves(columns=[0, 32]), "columns=32 doesn't exist. Choose from 0 to 31"),
        (lambda: plots.similarity("alibi"), "'alibi', which acts by distance_bias. Measurable: 'scores'"),
        (lambda: plots.counter(bits=9), "bits=9 must be from 2 to 7"),
        (lambda: plots.bias("alibi", length=4, heads=[]), "heads is empty. Choose one or more of 0 to 7"),
        (lambda: plots.bias("alibi", num_attention_heads=2, heads=[2]), "heads=2 doesn't exist. Choose from 0 to 1"),
        (lambda: plots.bias("sinusoidal"), "'sinusoidal', which acts by embed"),
        (lambda: plots.decay("alibi"), "must be a list"),
        (lambda: plots.probing(diagnostics.decay("alibi", 5)), "a Probing of hf_posenc.diagnostics, not a Decay"),
        (lambda: plots.counter(bits=2, path="a.jpg"), "a.jpg must end in .png, .svg or .pdf"),
        (lambda: plots.counter(bits=2, path=ROOT / "no" / "a.png"), "doesn't exist"),
        (lambda: plots.decy, "'hf_posenc.plots' has no attribute 'decy' (did you mean 'decay'?)"),
        (lambda: diagnostics.probin, "'hf_posenc.diagnostics' has no attribute 'probin' (did you mean 'probing'?)"),
    ],
)
def test_what_is_refused(draw, message):
    with pytest.raises((ValueError, AttributeError), match=re.escape(message)):
        draw()


# Files, threads, displays.


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_files(tmp_path, monkeypatch, suffix, start):
    """Figures need neither a display nor a certain backend. Drawing again gives the same bytes."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    file, again = tmp_path / f"counter{suffix}", tmp_path / f"again{suffix}"
    with matplotlib.rc_context({"backend": "TkAgg"}):
        plots.counter(bits=2, path=file)
    assert file.read_bytes().startswith(start) and [*tmp_path.iterdir()] == [file]
    if suffix in (".png", ".pdf"):  # the names of shapes in an SVG are random
        plots.counter(bits=2, path=again)
        assert again.read_bytes() == file.read_bytes()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match="is a directory"):
        plots.counter(bits=2, path=tmp_path / "folder.png")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    def half(figure, file, **options):
        file.write(b"half")
        raise OSError("no space left")

    file = tmp_path / "a.png"
    file.write_text("old")
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", half)
    with pytest.raises(OSError, match="no space left"):
        plots.counter(bits=2, path=file)
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == "old"


def test_matplotlib_is_imported_when_a_figure_is_drawn(monkeypatch):
    for path in (ROOT / "hf_posenc").rglob("*.py"):
        assert not re.search(r"^(import|from) matplotlib", path.read_text(encoding="utf-8"), re.MULTILINE), path.name
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (plots.counter, lambda: plots.vectors("sinusoidal")):
        with pytest.raises(ImportError, match="pip install"):
            draw()


def test_threads(tmp_path):
    """Figures drawn in several threads, light and dark, equal those of one thread."""

    def draw(number):
        plots.counter(bits=2, dark=bool(number % 2), path=tmp_path / f"{number}.png")

    draw(0), draw(1)
    threads = [threading.Thread(target=draw, args=(number,)) for number in range(2, 6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    files = [(tmp_path / f"{number}.png").read_bytes() for number in range(6)]
    assert files[0] == files[2] == files[4] != files[1] == files[3] == files[5]


def test_settings_of_the_user_stay_out():
    mine = ("text.color", "axes.facecolor", "axes.labelcolor", "figure.facecolor")
    with matplotlib.rc_context(dict.fromkeys(mine, "red")):
        before = dict(matplotlib.rcParams)
        figure = plots.vectors("sinusoidal", length=4, hidden_size=4)
        assert dict(matplotlib.rcParams) == before
    (axis, *_) = figure.axes
    assert {axis.title.get_color(), axis.xaxis.label.get_color()} == {style.LIGHT.ink}
    assert axis.get_facecolor() == figure.get_facecolor() == (1, 1, 1, 1)


# The command.


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["plot", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    assert isinstance(done.exception, SystemExit | None)
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plotted")
    stock("bert", num_hidden_layers=1).save_pretrained(path / "bert")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    BertTokenizer(str(path / "vocab.txt")).save_pretrained(path / "bert")
    (path / "texts.txt").write_text("a b c d e f g h\n" * 3)
    return path


@pytest.mark.parametrize(
    "line",
    [
        "vectors sinusoidal --option base=50 --length 8 --dark",
        "waves --column 2 --length 8",
        slow("""similarity '{"type": "sinusoidal", "base": 9}' --length 8"""),
        "counter --bits 2",
        slow("criteria counter"),
        "bias kerple --causal --head 1 --length 8",
        "decay alibi rope --length 8",
        slow(f"study {RESULTS}/alibi.json"),
        "probing bert --length 6 --layer 0",
        "attention bert --texts texts.txt",
    ],
)
def test_the_command(folder, tmp_path, monkeypatch, line):
    monkeypatch.chdir(folder)
    assert "written to" in run(*shlex.split(line), "--output", tmp_path / "a.png")
    assert os.listdir(tmp_path) == ["a.png"]


def test_a_registered_figure_is_a_command(tmp_path, folder, monkeypatch):
    """A registered figure is a command with the options of its diagnostic and its own. No other line is needed."""
    monkeypatch.setattr(registry, "DIAGNOSTICS", {})
    monkeypatch.setattr(registry, "FIGURES", {})

    @registry.diagnostic("model", on_page=True)
    def size(model, *, length: registry.TextLength = 5):
        return {"model": type(model).__name__, "length": length}

    @registry.figure(size, example="bert", length=7)
    def draw_size(result, *, layers: registry.Layers = None, dark: registry.Dark = False, path: registry.Path = None):
        """Draw the size of a model."""
        Path(path).write_text(json.dumps([result, layers, dark]))

    single = Typer()
    single.command()(_command(registry.FIGURES["size"]))
    for given, expected in (
        ((), [{"model": "BertModel", "length": 7}, None, False]),
        (("--length", "3", "--layer", "2", "--layer", "0", "--dark"), [{"model": "BertModel", "length": 3}, [2, 0], True]),
    ):
        done = CliRunner().invoke(single, [str(folder / "bert"), *given, "--output", str(tmp_path / "a.png")])
        assert done.exit_code == 0 and json.loads((tmp_path / "a.png").read_text()) == expected, done.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vectors alibi", "'alibi', which acts by distance_bias"),
        ("vectors sinusodial", "did you mean 'sinusoidal'"),
        ("decay rope alibi --option theta=3", "options as JSON"),
        ("criteria rope", "rope"),
        (f"study {ROOT}/README.md", "can't be read as JSON"),
        ("study nothing.json", "nothing.json"),
        ("probing . --output a.gif", "must end in .png, .svg or .pdf"),  # before the model is read
    ],
)
def test_the_command_refuses(folder, tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(folder)
    output = () if "--output" in line else ("--output", tmp_path / "a.png")
    assert message in run(*line.split(), *output, code=1) and not [*tmp_path.iterdir()]
