"""Models with attention code or inputs of their own, each by the weights that its first attention computes."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hf_posenc
from closeness import assert_apart, assert_close
from hf_posenc.attention.intercept import SOFTMAX
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
