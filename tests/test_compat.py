"""Other versions of Transformers and torch: tools/compat.py with the oldest supported versions."""

import sys
from pathlib import Path

import pytest

from tools import compat

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><skipped/></testcase>
<testcase name="c"><failure/></testcase><testcase name="d"><error/></testcase>
</testsuite></testsuites>"""
VERSIONS = {"Python": "3.10.1", **dict.fromkeys(compat.SHOWN, "1.0")}


def test_counts(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert compat.counted(tmp_path / "report.xml") == {"passed": 1, "skipped": 1, "failed": ["c", "d"]}


def test_table():
    found = {"oldest": {"versions": VERSIONS, "passed": 9, "skipped": 2, "failed": ["a"]}}
    crossings = {("newest", "oldest"): {"with": {"bert_alibi": ""}, "without": {"bert_alibi": "OSError: no", "gpt2_rope": ""}}}
    *rows, _, one, _, other = compat.table(found, crossings).splitlines()
    assert len({row.count("|") for row in rows}) == 1 and rows[2].endswith("| 9 | 2 | 1 |")
    assert one == "1 checkpoints saved with newest, loaded with oldest with the package: all load and give the same outputs."
    assert other == "2 checkpoints saved with newest, loaded with oldest without the package: wrong: bert_alibi."


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_oldest_versions():
    """The smoke set and the contract pass in the oldest versions, and checkpoints load in both directions.

    The test downloads about 100 MB, or 3 GB with CUDA.
    """
    package = compat.wheel()
    try:
        compat.create("oldest", package)
    except compat.Failed as failed:
        if "dns error" in str(failed) or "Connection" in str(failed):
            pytest.skip("the package registry can't be reached")
        raise
    found = compat.tested("oldest", [f"tests/test_{name}.py" for name in compat.SMOKE], package)
    assert not found["failed"] and found["passed"] > 4000, found
    here, there = Path(sys.executable), compat.python_of("oldest")
    for pair in ((here, there), (there, here)):
        for how, models in compat.crossed(*pair).items():
            assert len(models) > 30 and not any(models.values()), (how, models)
