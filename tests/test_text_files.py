"""Files of texts: a path is literal, and errors name the file, and in the commands also the line."""

import gzip

import pytest

from hf_posenc.cli.texts import read
from hf_posenc.training import data

NAMES = "[ab] [!b] * a? {a} \u00fc\u20ac -x ~ __h .h a\\b a%20b a#b http:/x hf:/x file:/a [d]/a"
NAMES = [f"{name}.txt" for name in (*NAMES.split(), "a b")]
CHAINED = ["a::b.txt", "zip:/x::y.txt"]


def texts(path):
    return [text for (text,) in read(path, {"--text-column": "text"})]


@pytest.fixture
def others(tmp_path, monkeypatch):
    """Files that a pattern or a URL would match instead, in the current directory."""
    for name in ("a.txt", "b.txt", "ax.txt", "x.txt", "d/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("wrong\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NAMES + CHAINED)
def test_a_path_is_literal(others, name):
    path = others / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("right\n")
    for given in (path, path.relative_to(others)):
        assert texts(given) == ["right"]
    if name in CHAINED:
        with pytest.raises(SystemExit, match="can't be read"):
            data.read(path)
    else:
        assert [row["text"] for row in data.read(path.relative_to(others), streaming=True)] == ["right"]


def test_paths_and_folders_are_literal_without_a_stream(others):
    for name in ("[ab].txt", "*.txt"):
        (others / name).write_text("right\n")
        assert data.read(others / name)["text"] == ["right"]
    (others / "[d]").mkdir()
    (others / "[d]" / "it.txt").write_text("right\n")
    assert [row["text"] for row in data.read(others / "[d]", streaming=True)] == ["right"]
    with pytest.raises(SystemExit, match=r"dataset_name.*Rename"):
        data.check_folder("[d]")
    data.check_folder("d")
    data.check_folder("somebody/[nothing]")


BAD = {
    "empty.json": b"",
    "empty.jsonl": b"",
    "empty.csv": b"",
    "empty.txt": b"",
    "empty.parquet": b"",
    "header.csv": b"text\n",
    "list.json": b"[]",
    "numbers.jsonl": b'{"text": "a"}\n1\n',
    "broken.jsonl": b'{"text": "a"}\n\n{"text":\n',
    "broken.json": b'[\n{"text": "a"},\n{"text" "b"}]',
    "deep.jsonl": b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "unclosed.csv": b'text\n"a b\nc d\n',
    "ragged.csv": b"text,label\na,b\nc,d,e\n",
    "latin.txt": "a\n\u00e9\n".encode("latin-1"),
    "magic.parquet": b"PAR1PAR1",
    "a.txt.gz": gzip.compress(b"a"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(ValueError, match=name):
        texts(tmp_path / name)


# The JSON reader of `datasets` reads numbers and strings as texts, pandas renames columns, and both decompress files.
@pytest.mark.parametrize(
    "name", [*(name for name in BAD if name.split(".")[0] in ("empty", "header", "broken", "unclosed", "latin", "magic", "a"))]
)
def test_bad_files_of_training_data(tmp_path, monkeypatch, name):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(SystemExit, match=name):
        data.read(tmp_path / name)


GOOD = {
    "lines.jsonl": b'{"text": "a"}\n\n{"text": "b"}\n',
    "lines.json": b'{"text": "a"}\n{"text": "b"}\n',
    "bom.jsonl": b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}',
    "list.json": b'[\n  {"text": "a"},\n  {"text": "b"}\n]',
    "texts.json": b'["a", "b"]',
    "windows.txt": b"a\r\nb\r\n",
    "mac.txt": b"a\rb\r",
    "quoted.csv": b'label,text\n1,a\n2,"b"\n',
}


@pytest.mark.parametrize("name", GOOD)
def test_forms(tmp_path, name):
    (tmp_path / name).write_bytes(GOOD[name])
    assert texts(tmp_path / name) == ["a", "b"]
    assert [row["text"] for row in data.read(tmp_path / name, streaming=True) if row["text"]] == ["a", "b"]


def test_rows_and_texts_over_several_lines(tmp_path):
    (tmp_path / "it.json").write_text('{\n"text":\n"a"\n}')
    assert texts(tmp_path / "it.json") == ["a"]
    (tmp_path / "it.csv").write_text('text\n12\nNA\n"two\nlines"\n\n""\n')
    assert texts(tmp_path / "it.csv") == ["12", "NA", "two\nlines"]
    assert list(data.read(tmp_path / "it.csv")["text"]) == ["12", "NA", "two\nlines", ""]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": 1}', "Row 2 of .*'text', must be a string, .*'1'"),
        ('{"text": null}', "Row 2 of .*'text'.*'None'"),
        ('{"words": "a"}', "Row 2 of .* 'text', only words.*--text-column"),
        (r'{"text": "\ud800"}', "Row 2 of .*surrogate"),
    ],
)
def test_bad_values(tmp_path, line, words):
    (tmp_path / "it.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(ValueError, match=words):
        texts(tmp_path / "it.jsonl")
