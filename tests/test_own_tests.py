"""The script that runs Transformers' own tests on patched classes."""

import pytest

from tools import own_tests

TESTS = """
import unittest
from transformers import BertConfig, BertModel

class BertModelTest(unittest.TestCase):
    def build(self):
        return BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))

    def test_encoding(self):
        assert self.build().encoder.layer[0].attention.self.posenc.type == "shaw"

    def test_name(self):
        assert type(self.build()).__name__ == "BertModel"

    def test_both(self):
        assert False
"""


@pytest.mark.slow
def test_a_family(tmp_path):
    """Classes are replaced in the tests. A test that also fails with the original class is counted apart."""
    folder = tmp_path / "tests" / "models" / "bert"
    folder.mkdir(parents=True)
    (folder / "test_modeling_bert.py").write_text(TESTS)
    result = own_tests.tested(tmp_path, "bert", "shaw", 100)
    assert (result.passed, result.also_original, [*result.failed]) == (1, 1, ["BertModelTest.test_name"])


def test_the_table():
    """A family that doesn't run isn't counted, and failures are listed by their reason."""
    failed = {"AModelTest.test_config": "TypeError: None", "AModelTest.test_new": "AssertionError: 1 != 2"}
    page = own_tests.table(
        [own_tests.Result("a", "rope", 7, 2, 1, failed), own_tests.Result("b", "alibi", unsupported="no positions")]
    )
    assert page.startswith("1 families: 7 tests pass, 2 fail with an encoding only, 1 explained\n")
    reasons = page.partition("no positions\n\n")[2].splitlines()
    assert [line.startswith(" ") for line in reasons] == [False, True, False, False, True]
    assert "Not explained: AssertionError: 1 != 2" in reasons and "    a, rope: AModelTest test_config" in reasons
