"""Several encodings in one model."""

import json

import pytest
import torch
from transformers import AutoModel

import hf_posenc
from closeness import assert_apart, assert_close
from models import first, patched, randomize_encoding, stock, tokens
from oracles import sinusoids


@pytest.mark.parametrize("host", ["bert", "gpt2", "mpnet"])
@torch.no_grad()
def test_a_composition_is_all_of_its_parts(host):
    """Without any one of them the outputs differ; their order and a further `none` change nothing."""
    whole = patched(host, "sinusoidal+rope+alibi")
    expected = first(whole(tokens()))
    for part in whole.posenc.children():
        if isinstance(part, hf_posenc.PositionEncoding):
            less = "+".join(name for name in ("sinusoidal", "rope", "alibi") if name != part.type)
            assert_apart(first(patched(host, less)(tokens())), expected)
    nothing = first(patched(host, "sinusoidal+rope+alibi+none")(tokens()))
    assert_close(nothing, expected)
    assert_close(first(patched(host, "alibi+rope+sinusoidal")(tokens())), expected)


def test_options_of_a_composition_are_saved(tmp_path):
    options = {"sinusoidal": {"base": 77.0, "layout": "concatenated", "scale": "learned"}}
    model = hf_posenc.patch(
        stock("bert"),
        {"type": "sinusoidal+rotary+alibi", **options},
        rotary__theta=50,
        rope__layout="interleaved",
        max_length=9,
    )
    randomize_encoding(model).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["position_encoding"]
    rope, alibi = {"theta": 50.0, "layout": "interleaved"}, {"slopes": "fixed", "sides": "symmetric", "per_layer": False}
    host = saved.pop("original")
    options["sinusoidal"] |= {"bases": None, "frequencies": "fixed", "trained_length": None}
    assert host["kept"] and saved == {
        "type": "sinusoidal+rope+alibi", **options, "rope": rope, "alibi": alibi, "inject": "input", "max_length": 9
    }  # fmt: skip
    assert "posenc.sinusoidal.factor" in model.state_dict()
    assert hf_posenc.inspect(model).options == {**options, "rope": rope, "alibi": alibi}
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens(length=9))), first(model(tokens(length=9))))
    with pytest.raises(ValueError, match=r"10 tokens.*max_length=9 of this model's 'sinusoidal\+rope\+alibi'"):
        model(tokens(length=10))

    # Options given on loading replace the saved ones, part by part.
    given = {"type": "sinusoidal+rope+alibi", "rope": {"theta": 5.0}, "sinusoidal": {"base": 3.0}}
    other = AutoModel.from_pretrained(tmp_path, position_encoding=given)
    expected = {"sinusoidal": {**options["sinusoidal"], "base": 3.0}, "rope": {**rope, "theta": 5.0}, "alibi": alibi}
    assert {part: other.config.position_encoding[part] for part in expected} == expected
    assert other.config.position_encoding["max_length"] == 9 and other.config.position_encoding["original"] == host
    assert (other.posenc.rope.theta, other.posenc.rope.layout, other.posenc.sinusoidal.base) == (5.0, "interleaved", 3.0)
    given = {"type": "sinusoidal+rotary+alibi", "rope__theta": 6.0}
    assert AutoModel.from_pretrained(tmp_path, position_encoding=given).posenc.rope.theta == 6.0
    same = AutoModel.from_pretrained(tmp_path, position_encoding="sinusoidal+rotary+alibi")
    assert torch.equal(first(same(tokens(length=9))), first(model(tokens(length=9))))
    for wrong in ("sinusoidal+rope", "rope+sinusoidal+alibi", "sinusoidal", "alibi"):
        with pytest.raises(ValueError, match=r"saved with the 'sinusoidal\+rope\+alibi' encoding, not"):
            AutoModel.from_pretrained(tmp_path, position_encoding=wrong)


def test_position_embedding_takes_what_embeds_alone():
    layer = hf_posenc.PositionEmbedding("sinusoidal+learned", 8, max_length=5, learned__std=1)
    expected = layer.posenc.learned.weight + sinusoids([range(5)], 8)
    assert_close(layer(torch.zeros(1, 5, 8)), expected)
    for kind in ("sinusoidal+alibi", "alibi+none", "rope+sinusoidal", "sinusoidal+shaw"):
        with pytest.raises(ValueError, match=r"doesn't act by vectors alone.*hf_posenc\.patch"):
            hf_posenc.PositionEmbedding(kind, 8)
