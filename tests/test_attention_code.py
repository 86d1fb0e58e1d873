"""Models with attention code or inputs of their own, each by the weights that its first attention computes."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from models import randomize_encoding, tokens
from models import tiny as tiny_of
from oracles import in_pieces, sinusoids
from tools.hosts import tiny
from tools.hosts.inputs import reading

HEADS = 4
FAMILIES = {
    "bigbird_pegasus": (11, 0, 0),
    "eomt": (16, 205, 0),
    "eomt_dinov3": (16, 205, 0),
    "idefics": (11, 0, 0),
    "informer": (8, 0, 0),
    "lxmert": (11, 0, 0),
    "seggpt": (16, 0, 0),
    "speecht5": (12, 0, 0),
    "timesfm": (16, 0, 0),
    "trocr": (11, 0, 0),
    "udop": (11, 0, 0),
    "videomt": (16, 205, 0),
    "vilt": (11, 0, 17),
    "vitdet": (16, 0, 0),
    "vits": (11, 0, 0),
    "vjepa2": (32, 0, 0),
}
"""Model type -> the number of tokens with a position in its first attention, and of those before and behind them."""


SOFTMAX = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)


class Weights(TorchFunctionMode):
    """Finds the first softmax of scores between this number of tokens, `[B, H, L, L]`."""

    def __init__(self, length):
        super().__init__()
        self.length, self.found = length, None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function in SOFTMAX and self.found is None and result.shape[-2:] == (self.length, self.length):
            self.found = result.reshape(-1, HEADS, self.length, self.length)
        return result


def first_weights(model, given, length):
    with Weights(length) as weights, torch.no_grad():
        torch.manual_seed(0)
        model(**given)
    return weights.found


def slopes(length):
    """ALiBi's biases `[H, L, L]` for 4 heads."""
    index = torch.arange(float(length))
    return torch.stack([-(index - index[:, None]).abs() * 2.0 ** (-2 * head) for head in (1, 2, 3, 4)])


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_weights_of_the_first_attention(kind):
    """ALiBi's bias is added to the scaled scores of tokens with a position. A rotation changes scores between them."""
    count, before, behind = FAMILIES[kind]
    model = tiny.build(kind, only=0 if before else None)
    model.set_attn_implementation("eager")
    given, length = reading(kind, model)(0), before + count + behind
    without, alibi, rope = (first_weights(hf_posenc.patch(model, each), given, length) for each in ("none", "alibi", "rope"))
    bias = torch.nn.functional.pad(slopes(count), (before, behind) * 2)
    assert_close(alibi, (without.log() + bias).softmax(-1), rtol=1e-3)
    assert_apart(rope, without)


@pytest.mark.parametrize("kind", ["lxmert", "vilt"])
@torch.no_grad()
def test_padding_on_the_left_is_not_counted(kind):
    """These models take no position_ids, and number all tokens from 0. ViLT's image, in a random order, comes behind."""
    model = hf_posenc.patch(tiny.build(kind), "sinusoidal")
    given = reading(kind, model)(0)
    ids = given["input_ids"]
    padded = {"input_ids": torch.cat([ids[:, :3], ids], 1), "attention_mask": torch.ones(1, 14).long()}
    padded["attention_mask"][:, :3] = 0
    assert_close(model(**{**given, **padded})[0][:, 3:14], model(**given)[0][:, :11])


@torch.no_grad()
def test_tied_tables_of_distances(tmp_path):
    """UDOP ties two tables of distances, which are both disabled."""
    model = tiny_of("UdopForConditionalGeneration")
    ids, boxes = tokens(1, 7), torch.full((1, 7, 4), 0.2)
    given = {"input_ids": ids, "bbox": boxes, "decoder_input_ids": ids}
    new = hf_posenc.patch(model, "rope")
    new.save_pretrained(tmp_path)
    again = type(new).from_pretrained(tmp_path)
    assert_equal(again(**given)[0], new(**given)[0])
    assert_equal(hf_posenc.unpatch(again)(**given)[0], model(**given)[0])


@pytest.mark.parametrize("inject", ["every_layer", "after_attention"])
@torch.no_grad()
def test_vectors_in_layers_with_rows_and_columns(inject):
    """VitDet's layers have the features first, and its attentions have them last."""
    model = tiny.build("vitdet")
    new, pixels = hf_posenc.patch(model, "sinusoidal", inject=inject), reading("vitdet", model)(0)["pixel_values"]
    vectors = sinusoids([range(16)], 32)[0]
    bare = hf_posenc.patch(model, "none")
    for layer in bare.encoder.layer:
        if inject == "every_layer":
            layer.register_forward_pre_hook(lambda module, args: (args[0] + vectors.T.view(32, 4, 4), *args[1:]))
        else:
            add = lambda module, args, output: (output[0] + vectors.view(4, 4, 32), *output[1:])  # noqa: E731
            layer.attention.register_forward_hook(add)
    assert_close(new(pixels)[0], bare(pixels)[0])


@torch.no_grad()
def test_an_image_behind_the_text_has_no_position():
    """UDOP appends the patches that have no text. Their order is known from their boxes."""
    model = hf_posenc.patch(tiny_of("UdopEncoderModel"), "none")
    ids, boxes, image = tokens(1, 7), torch.full((1, 7, 4), 0.2), torch.randn(1, 3, 32, 32)
    order = torch.randperm(7)
    states, other = (model(each, bbox=boxes, pixel_values=image)[0] for each in (ids, ids[:, order]))
    assert states.shape[1] > 7
    assert_close(other[:, :7], states[:, :7][:, order])
    assert_close(other[:, 7:], states[:, 7:])
    for encoding in ("rope", "alibi", "sinusoidal"):
        new = hf_posenc.patch(tiny_of("UdopEncoderModel"), encoding)
        states, other = (new(each, bbox=boxes, pixel_values=image)[0] for each in (ids, ids[:, order]))
        assert_apart(other[:, :7], states[:, :7][:, order])


@torch.no_grad()
def test_cached_keys_of_trocr():
    model = randomize_encoding(hf_posenc.patch(tiny_of("TrOCRForCausalLM"), "sinusoidal+rope+alibi+shaw"))
    ids = tokens(2, 11)
    assert_close(in_pieces(model, ids, (4, 5, 9)), model(ids, use_cache=False)[0])
