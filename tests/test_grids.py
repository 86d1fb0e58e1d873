"""Encodings of rows and columns in image models: sinusoidal_2d and rope_2d.

Shapes: B batch, L patches, H heads, E head_dim, D hidden_size.
"""

import cmath
import copy
import functools
import math
import sys
from dataclasses import replace

import pytest
import torch
import transformers

import hf_posenc
import oracles
from closeness import assert_apart, assert_close, assert_equal
from conftest import run_python
from hf_posenc.encodings import PatchLayout
from models import randomize
from models import stock as text_model
from oracles import drawn, random
from test_vision import ORDER, PATCHES, SIZES, images, in_order, patched, patches_in_order, states, stock, with_vectors

CELLS = [(row, column) for row in range(4) for column in range(4)]
LAYOUTS = ("half", "interleaved")
ROWS_EXCHANGED = torch.arange(PATCHES).view(4, 4)[[1, 0, 2, 3]].flatten()
COLUMNS_EXCHANGED = torch.arange(PATCHES).view(4, 4)[:, [1, 0, 2, 3]].flatten()
TRANSPOSED = torch.arange(PATCHES).view(4, 4).T.flatten()
made = functools.partial(oracles.make, hidden_size=32, axes=2)


def context_of(encoding, grid=(4, 4), **changes):
    return oracles.context_of(encoding, [range(math.prod(grid))], patches=PatchLayout(**{"grid": grid, **changes}))


def cells_of(rows, columns):
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(rows, columns, 2)


def vectors(cells, size, base=10000.0, layout="interleaved", first="row"):
    """The vectors `[L, D]`, number by number."""
    table = []
    for row, column in cells:
        vector = []
        for coordinate, width in zip(
            (row, column) if first == "row" else (column, row), (-(-size // 2), size // 2), strict=True
        ):
            angles = [coordinate / base ** (2 * i / width) for i in range(-(-width // 2))]
            sines, cosines = [math.sin(a) for a in angles], [math.cos(a) for a in angles]
            pairs = [each for pair in zip(sines, cosines, strict=True) for each in pair]
            vector += (sines + cosines if layout == "concatenated" else pairs)[:width]
        table.append(vector)
    return torch.tensor(table)


def axial(heads, half, theta=100.0):
    """The radians per row and per column for each pair of features, `[H][E/2]`."""
    steps = [theta ** (-2 * i / half) for i in range(half // 2)]
    return [[*((step, 0.0) for step in steps), *((0.0, step) for step in steps)]] * heads


def turned(states, cells, steps, layout="half"):
    """Rotated states. steps: radians per row and per column, `[H][E/2]`."""

    def turn(b, h, i, pair):
        return cmath.exp(1j * sum(place * step for place, step in zip(cells[i], steps[h][pair], strict=True)))

    return oracles.turned(states, turn, layout)


# Results of the encodings.


@pytest.mark.parametrize("size", [4, 7, 10, 32])
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("first", ["row", "column"])
def test_vectors_of_rows_and_columns(size, layout, first):
    encoding = made("sinusoidal_2d", hidden_size=size, base=50.0, layout=layout, first=first)
    cells = [(0, 0), (1, 0), (0, 1), (3, 5), (511, 70), (10**6, 3)]
    assert_close(encoding("embed", torch.tensor(cells)).float(), vectors(cells, size, 50.0, layout, first))


def test_vectors_of_other_libraries():
    """The vectors equal those of DETR, MAE, and positional_encodings. DETR counts from 1, and MAE starts with the column."""
    from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding
    from transformers.models.vit_mae.modeling_vit_mae import ViTMAEEmbeddings

    cells, encoding = cells_of(6, 9), made("sinusoidal_2d")
    detr = DetrSinePositionEmbedding(16)(torch.Size([1, 3, 6, 9]), torch.device("cpu"), torch.float32)
    assert_close(encoding("embed", cells + 1).float(), detr[0].permute(1, 2, 0))
    mae, ours = (
        ViTMAEEmbeddings(transformers.ViTMAEConfig(**SIZES)),
        made("sinusoidal_2d", layout="concatenated", first="column"),
    )
    mae.initialize_weights()
    assert_close(ours("embed", torch.tensor(CELLS)).float(), mae.position_embeddings.data[0, 1:])
    library = pytest.importorskip("positional_encodings.torch_encodings")
    assert_close(encoding("embed", cells).float(), library.PositionalEncoding2D(32)(torch.zeros(1, 6, 9, 32))[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("theta", [10.0, 100.0])
def test_axial_rotation(layout, theta):
    """The rotation is exact for far cells in half precision also: angles are exact in float64, and cast last."""
    encoding = made("rope_2d", layout=layout, theta=theta)
    query, key, cells = random(2, 4, 6, 8), random(2, 2, 6, 8, seed=1), cells_of(2, 3).flatten(0, 1).tolist()
    got = encoding("rotate", query, key, context_of(encoding, (2, 3)))
    for each, given in zip(got, (query, key), strict=True):
        assert_close(each, turned(given, cells, axial(given.shape[1], 4, theta), layout), rtol=1e-9, atol=1e-12)
    assert encoding("rotate", None, None, context_of(encoding)) == (None, None)
    far, half = torch.tensor([[[10**6, 3], [5, 10**6 + 1]]]), query[:1, :, :2].bfloat16()
    got, _ = encoding("rotate", half, None, context_of(encoding, (1, 2), cells=far))
    assert got.dtype == torch.bfloat16
    assert_close(got.float(), turned(half, far[0].tolist(), axial(4, 4, theta), layout).float(), atol=2e-2)


@pytest.mark.parametrize("theta", [10.0, 100.0])
def test_axial_rotation_of_rotary_embedding_torch(theta):
    library = pytest.importorskip("rotary_embedding_torch")
    rotary = library.RotaryEmbedding(dim=8, freqs_for="lang", theta=theta)
    encoding, query = made("rope_2d", head_dim=16, theta=theta, layout="interleaved"), random(2, 4, 6, 9, 16).float()
    expected = library.apply_rotary_emb(rotary.get_axial_freqs(6, 9), query).flatten(2, 3)
    got, _ = encoding("rotate", query.flatten(2, 3), None, context_of(encoding, (6, 9)))
    assert_close(got, expected.detach())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_rotation_and_its_gradients(layout):
    """Two query heads share each key head."""
    encoding = made("rope_2d", groups=2, frequencies="mixed", layout=layout, seed=0, dtype=torch.float64)
    query, key, cells = random(1, 4, 6, 8), random(1, 2, 6, 8, seed=1), cells_of(2, 3).flatten(0, 1).tolist()
    weights = random(1, 4, 6, 8, seed=2), random(1, 2, 6, 8, seed=3)

    def expected(weight):
        steps = weight.permute(1, 2, 0).tolist()
        of_queries = [each for each in steps for _ in range(2)]
        return [turned(query, cells, of_queries, layout), turned(key, cells, steps, layout)]

    got = encoding("rotate", query, key, context_of(encoding, (2, 3)))
    assert_close(list(got), expected(encoding.weight), rtol=1e-9, atol=1e-9)
    sum((each * by).sum() for each, by in zip(got, weights, strict=True)).backward()
    for at in ((0, 0, 0), (1, 0, 3), (0, 1, 2), (1, 1, 1)):  # by central differences
        sums = []
        for by in (1e-5, -1e-5):
            moved = encoding.weight.detach().clone()
            moved[at] += by
            sums.append(sum((each * by_).sum() for each, by_ in zip(expected(moved), weights, strict=True)).item())
        assert encoding.weight.grad[at].item() == pytest.approx((sums[0] - sums[1]) / 2e-5, rel=1e-5, abs=1e-5)


def test_where_mixed_frequencies_start():
    """The frequencies start on the two axes, rotated by a fraction of 90 degrees for each head."""
    weight = made("rope_2d", frequencies="mixed").weight.detach()
    steps = torch.tensor(axial(4, 4)).permute(2, 0, 1)
    assert_close(weight[:, 0], steps[:, 0])
    for head in range(4):
        turn = cmath.exp(1j * math.pi / 2 * head / 4)
        for pair in range(4):
            expected = complex(*steps[:, head, pair].tolist()) * turn
            assert complex(*weight[:, head, pair].tolist()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"layout": "interleaved"}, {"frequencies": "mixed"}])
def test_a_shift_of_the_grid_leaves_scores(options):
    encoding = drawn(made("rope_2d", **options))
    cells, query, key = torch.tensor([CELLS]), random(2, 4, 16, 8), random(2, 4, 16, 8, seed=1)

    def scores(at):
        one, other = encoding("rotate", query, key, context_of(encoding, cells=at))
        return one @ other.mT

    here = scores(cells)
    assert_close(scores(cells + torch.tensor([7, -3])), here)
    assert_apart(scores(cells * torch.tensor([1, 2])), here)
    assert_apart(scores(cells * torch.tensor([2, 1])), here)


# In models.


CHOSEN = {
    "sinusoidal_2d": {},
    "rope_2d": {},
    "mixed": {"frequencies": "mixed", "per_layer": True},
    "sinusoidal_2d+alibi": {},
}


def with_encoding(model, name):
    return patched(model, name.replace("mixed", "rope_2d"), **CHOSEN[name])


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("vit", "sinusoidal_2d"),
        ("registers", "rope_2d"),
        ("yolos", "mixed"),
        ("siglip", "sinusoidal_2d+alibi"),
        ("beit", "rope_2d"),
    ],
)
def test_order_of_patches_in_both_directions(name, encoding):
    pixels, new = images(), with_encoding(stock(name), encoding)
    here = states(new, pixels)
    for order in (ORDER, ROWS_EXCHANGED, COLUMNS_EXCHANGED, TRANSPOSED):
        assert_apart(states(new, in_order(pixels, order)), patches_in_order(name, here, order))


def test_vectors_are_added_to_the_patches():
    model, pixels = stock("vit"), images()
    expected = states(with_vectors(model, vectors(CELLS, 32)), pixels)
    assert_close(states(hf_posenc.patch(model, "sinusoidal_2d"), pixels), expected)
    composed, twin = hf_posenc.patch(model, "sinusoidal_2d+alibi"), hf_posenc.patch(model, "learned+alibi", max_length=PATCHES)
    with torch.no_grad():
        twin.posenc.learned.weight.copy_(vectors(CELLS, 32))
    assert_close(states(composed, pixels), states(twin, pixels))


@torch.no_grad()
def test_rotation_leaves_the_class_token():
    model, pixels = stock("vit"), images(batch=1)
    new = hf_posenc.patch(model, "rope_2d")
    new.set_attn_implementation("eager")
    got = new(pixels, output_attentions=True).attentions[0]
    layer, hidden = model.layers[0], hf_posenc.patch(model, "none").embeddings(pixels)
    normed = layer.layernorm_before(hidden)
    query, key = (
        project(normed).unflatten(-1, (4, 8)).transpose(1, 2).double()
        for project in (layer.attention.q_proj, layer.attention.k_proj)
    )
    for each in (query, key):
        each[:, :, 1:] = turned(each[:, :, 1:], CELLS, axial(4, 4))
    assert_close(got, (query @ key.transpose(2, 3) / 8**0.5).softmax(-1).float())


@pytest.mark.parametrize("encoding", CHOSEN)
def test_another_image_size(encoding):
    """The same weights give the same output in a model whose config has that size."""
    model, pixels = stock("vit"), images(height=48, width=32)
    larger = stock("vit", image_size=[48, 32])
    larger.load_state_dict({n: p for n, p in model.state_dict().items() if "position" not in n}, strict=False)
    got = states(with_encoding(model, encoding), pixels, interpolate_pos_encoding=True)
    assert_close(got, states(with_encoding(larger, encoding), pixels))
    if encoding == "sinusoidal_2d":
        assert_close(got, states(with_vectors(larger, vectors(cells_of(6, 4).flatten(0, 1).tolist(), 32)), pixels))


def test_patches_that_are_left_keep_their_cells():
    noise = torch.rand(2, PATCHES, generator=torch.Generator().manual_seed(2))
    model, pixels = stock("ViTMAE", **SIZES), images()
    twin = copy.deepcopy(model)
    twin.embeddings.position_embeddings.data[0, 1:] = vectors(CELLS, 32)
    twin.embeddings.position_embeddings.data[0, 0] = 0
    assert_close(states(hf_posenc.patch(model, "sinusoidal_2d"), pixels, noise=noise), states(twin, pixels, noise=noise))
    new, in_rows = patched(stock("ViTMAE", **SIZES, mask_ratio=0.0), "rope_2d"), torch.arange(PATCHES).expand(2, -1) / PATCHES
    expected, order = states(new, pixels, noise=in_rows), noise.argsort(dim=1)
    got = states(new, pixels, noise=noise)
    assert_close(got[:, 1:], expected[:, 1:].gather(1, order[..., None].expand(-1, -1, 32)))


@pytest.mark.parametrize("encoding", CHOSEN)
def test_smaller_images_of_a_batch(encoding):
    """Idefics pads images on the right and below. The width of the batch changes nothing."""
    config = transformers.models.idefics3.Idefics3VisionConfig(**SIZES)
    model = randomize(transformers.models.idefics3.Idefics3VisionTransformer(config)).eval()
    new, pixels, shown = with_encoding(model, encoding), images(), torch.zeros(2, 4, 4, dtype=torch.bool)
    shown[0], shown[1, :3, :2] = True, True
    together = states(new, pixels, patch_attention_mask=shown)
    alone = states(new, pixels[1:, :, :24, :16], patch_attention_mask=torch.ones(1, 3, 2, dtype=torch.bool))
    assert_close(together[1].unflatten(0, (4, 4))[:3, :2].flatten(0, 1), alone[0])


def qwen():
    sizes = dict(depth=2, hidden_size=32, num_heads=4, intermediate_size=48, patch_size=8, out_hidden_size=32)
    config = transformers.Qwen3VLVisionConfig(**sizes, deepstack_visual_indexes=[0])
    return randomize(transformers.Qwen3VLVisionModel(config)).eval()


def test_images_in_one_row():
    """Qwen's vision model gets the cell of each patch, in blocks of 2 x 2. It has an axial rotation itself."""
    model = qwen()
    with torch.no_grad():
        model.pos_embed.weight.zero_()
    new = hf_posenc.patch(model, "rope_2d", theta=10000.0)
    grids, pixels = torch.tensor([[1, 4, 4], [2, 2, 6], [1, 6, 2]]), random(52, 3 * 2 * 8 * 8).float()
    for chosen, patches in ((grids[:1], pixels[:16]), (grids[1:2], pixels[16:40]), (grids[::2], pixels[:28])):
        assert_close(states(new, patches, grid_thw=chosen), states(model, patches, grid_thw=chosen))
    with pytest.raises(ValueError, match="2 coordinates for each of 12 tokens"):
        new(pixels[16:], grid_thw=grids[1:])  # 12 tokens can be a grid of 2 x 6 or of 6 x 2
    added = patched(qwen(), "sinusoidal_2d")
    together = states(added, pixels, grid_thw=grids)
    assert_close(together[40:], states(added, pixels[40:], grid_thw=grids[2:]))
    assert_apart(states(added, pixels[40:], grid_thw=torch.tensor([[1, 2, 6]])), together[40:])


# Custom encodings.


def test_frames_rows_and_columns(own_registry):
    """VideoMAE cuts each patch from two frames."""

    class Volume(hf_posenc.PositionEncoding, type="volume"):
        axes = 3

        def embed(self, positions):
            frames, rows, columns = positions.unbind(-1)
            return torch.nn.functional.one_hot(frames * 100 + rows * 10 + columns, 200)[..., :32].double()

    model, video = stock("VideoMAE", **SIZES, num_frames=4, tubelet_size=2), random(1, 4, 3, 32, 32).float()
    new, seen = hf_posenc.patch(model, "volume"), []
    new.posenc.register_forward_pre_hook(lambda module, args: seen.append(args))
    assert states(new, video).shape == (1, 32, 32)
    (verb, positions), *_ = seen
    assert verb == "embed" and positions[0].tolist() == [[frame, *cell] for frame in range(2) for cell in CELLS]
    with pytest.raises(ValueError, match="'volume' requires 3-D positions .* 2-D"):
        hf_posenc.patch(stock("vit"), "volume")


# Windows.

SWIN = {"patch_size": 4, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
WINDOWS = {
    "Swin": SWIN,
    "Swinv2": SWIN,
    "DonutSwin": SWIN,
    "MaskFormerSwin": SWIN,
    "Swin2SR": {**SWIN, "patch_size": 1, "image_size": 8, "num_heads": [2, 2]},
    "ClapAudio": {**SWIN, "patch_stride": [4, 4], "spec_size": 64, "num_mel_bins": 16, "num_attention_heads": [2, 4]},
    "SamVision": {"window_size": 3, "global_attn_indexes": [1]},
    "SamHQVision": {"window_size": 3, "global_attn_indexes": [1]},
    "Sam3ViT": {"window_size": 3, "global_attn_indexes": [1]},
    "VitDet": {"window_size": 3, "window_block_indices": [0]},
}
"""Prefix of a model -> sizes with several windows. The second layers of SAM, SAM 3, and ViTDet see the whole image."""


def run_on_image(prefix, model, height, width):
    if prefix == "ClapAudio":
        return states(model, random(1, 1, 64, 16).float(), is_longer=torch.tensor([[False]]))
    return states(model, images(batch=1, height=height, width=width))


@pytest.mark.parametrize(
    ("prefix", "height", "width"),
    # 2 x 8 patches are as many as a window has, but the model pads them to two windows.
    [*((prefix, 32, 32) for prefix in WINDOWS), ("Swinv2", 8, 32), ("MaskFormerSwin", 8, 32), ("VitDet", 32, 64)],
)
def test_cells_in_windows(prefix, height, width, own_registry):
    """Each model's own function cuts a map of rows and columns into windows. Their cells begin at 0."""

    class Cells(hf_posenc.PositionEncoding, type="cells"):
        axes = 2

        def rotate(self, query, key, context):
            seen.append(context.coordinates(2))
            return query, key

    new, seen, expected = hf_posenc.patch(stock(prefix, **WINDOWS[prefix]), "cells"), [], []

    def record(layer, args, output):
        size = layer.window_size
        cut = getattr(layer, "window_partition", None) or sys.modules[type(layer).__module__].window_partition
        parts = cut(cells_of(4 * size, 4 * size)[None], size) if size else [cells_of(height // 8, width // 8)]
        expected.append((parts[0] if isinstance(parts, tuple) else parts)[0].flatten(0, 1))

    layers = [module for module in new.modules() if isinstance(getattr(module, "window_size", None), int)]
    for layer in (each for each in layers if hasattr(each, "attention") or hasattr(each, "attn")):
        layer.register_forward_hook(record)
    run_on_image(prefix, new, height, width)
    assert len(seen) == len(expected) == (2 if "V" in prefix or prefix == "VitDet" else 4)
    assert_equal([cells[0] for cells in seen], expected)


@pytest.mark.parametrize(("prefix", "grid"), [("Swin", (8, 12)), ("Swinv2", (8, 12)), ("Swin2SR", (32, 48))])
def test_vectors_before_windows(prefix, grid):
    """The rows and columns are those of the whole image. The layer stacks of Swin and Swin2SR don't compute the patches."""
    given = []
    for encoding in ("sinusoidal_2d", "none"):
        new = hf_posenc.patch(stock(prefix, **WINDOWS[prefix]), encoding)
        layer = next(module for module in new.modules() if hasattr(module, "shift_size"))
        layer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
        run_on_image(prefix, new, 32, 48)
    assert_close(given[0] - given[1], vectors(cells_of(*grid).flatten(0, 1).tolist(), given[0].shape[-1])[None], atol=1e-5)


@torch.no_grad()
def test_vectors_after_attention_in_windows():
    """Each patch gets the vector of its row and column in the window. 2 x 8 patches are as many as a window has."""
    sizes, pixels, outputs = {**SWIN, "depths": [1], "num_heads": [2]}, images(batch=1, height=8, width=32), []
    for encoding, inject in (("none", {}), ("sinusoidal_2d", {"inject": "after_attention"})):
        new = hf_posenc.patch(stock("MaskFormerSwin", **sizes), encoding, **inject)
        new.encoder.layers[0].blocks[0].attention.register_forward_hook(lambda *given: outputs.append(given[-1][0]))
        new(pixels)
    assert_close(outputs[1] - outputs[0], vectors(CELLS, outputs[0].shape[-1]).expand(2, -1, -1), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("encoding", ["rope_2d", "mixed", "sinusoidal_2d"])
def test_a_new_process_loads_models_with_windows(encoding, tmp_path):
    model, pixels = transformers.SwinForImageClassification(stock("Swin", **WINDOWS["Swin"]).config).eval(), images()
    new = with_encoding(randomize(model), encoding)
    new.save_pretrained(tmp_path)
    torch.save((pixels, new(pixels).logits, model(pixels).logits), tmp_path / "kept.pt")
    code = (
        "import sys, torch, transformers, hf_posenc\n"
        "pixels, ours, theirs = torch.load(sys.argv[1] + '/kept.pt')\n"
        "model = transformers.AutoModelForImageClassification.from_pretrained(sys.argv[1])\n"
        "with torch.no_grad():\n"
        "    print(model(pixels).logits.equal(ours), hf_posenc.unpatch(model)(pixels).logits.equal(theirs))\n"
    )
    assert run_python(code, tmp_path) == "True True\n"


# Models without a grid.


@pytest.mark.parametrize("encoding", ["sinusoidal_2d", "rope_2d", "alibi+rope_2d"])
def test_models_without_a_grid(encoding):
    for model in (text_model("bert"), text_model("gpt2")):
        with pytest.raises(ValueError, match="_2d' requires 2-D positions \\(row and column\\), .* 1-D"):
            hf_posenc.patch(model, encoding)
        assert not hasattr(model, "posenc")
    with pytest.raises(ValueError, match="this model has 3-D"):
        hf_posenc.patch(stock("VideoMAE", **SIZES, num_frames=2, tubelet_size=1), encoding)
    if encoding == "sinusoidal_2d":
        with pytest.raises(ValueError, match="'sinusoidal_2d' requires 2-D positions"):
            hf_posenc.PositionEmbedding(encoding, 32)


def test_windows_without_a_grid():
    window = replace(context_of(made("rope_2d"), images=(4,)), positions=torch.arange(4)[None])
    with pytest.raises(ValueError, match="each of 4 tokens"):
        window.coordinates(2)
    unknown = oracles.context_of(made("rope_2d"), [[]], patches=PatchLayout(grid=(2, 8), windows=True))
    assert unknown.with_length(16, torch.device("cpu"), square=True).coordinates(2)[0].tolist() == [[*cell] for cell in CELLS]
    for length, square in ((12, True), (4, False)):
        with pytest.raises(ValueError, match=f"each of {length} tokens.* windows"):
            unknown.with_length(length, torch.device("cpu"), square).coordinates(2)


def test_frames():
    new = patched(stock("Timesformer", **SIZES, num_frames=3), "rope_2d")
    with pytest.raises(ValueError, match="2 coordinates for each of 3 tokens"):
        new(images(batch=3)[None])
    encoding = made("rope_2d")
    context = context_of(encoding)
    frames = replace(context, positions=torch.arange(32)[None], computed={})
    with pytest.raises(ValueError, match="each of 32 tokens"):
        frames.coordinates(2)
    assert_equal(frames.coordinates(1), frames.positions)
