"""Image models: positions of patches, special tokens, windows, and images of several sizes.

Shapes: B batch, N patches, H heads, E head_dim, D hidden_size.
"""

import copy
import itertools
import math

import pytest
import torch
import transformers

import hf_posenc
import models
from closeness import assert_apart, assert_close, assert_equal
from hf_posenc.encodings import PatchLayout, PositionContext
from models import VISION_HOSTS, randomize, randomize_encoding, slow, tiny
from oracles import sinusoids
from tools.hosts.tiny import build

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8)
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
OTHERS = {"deit": (2, 0), "registers": (5, 0), "yolos": (1, 3), "siglip": (0, 0), "dinov3": (5, 0), "sam3": (0, 0)}
"""The number of tokens before and after the patches, unless it is one and zero."""
ENCODINGS = ("sinusoidal", "learned", "rope", "alibi", "shaw")
PATCHES = 16


def stock(name, **changes):
    return models.stock(name, **changes) if name in VISION_HOSTS else tiny(f"{name}Model", **changes)


def patched(model, encoding, **options):
    options = {"max_length": PATCHES, **options} if encoding == "learned" else options
    return randomize_encoding(hf_posenc.patch(model, encoding, **options))


def images(batch=2, height=32, width=32, seed=0):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def states(model, *args, **kwargs):
    """Hidden states `[B, tokens, D]`, or with the patches by row and column if the model returns them so."""
    return model(*args, **kwargs)[0]


def in_order(pixels, order):
    """Images with their 8 x 8 patches in another order."""
    blocks = pixels.unflatten(2, (4, 8)).unflatten(4, (4, 8)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order]
    return blocks.unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def patches_in_order(name, output, order):
    before, behind = OTHERS.get(name, (1, 0))
    parts = output[:, :before], output[:, before : before + PATCHES][:, order], output[:, before + PATCHES :]
    assert output.shape[1] == before + PATCHES + behind
    return torch.cat(parts, 1)


ORDER = torch.randperm(PATCHES, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [name for name in VISION_HOSTS if name != "sam3"])
def test_order_of_patches(name):
    model, pixels = stock(name), images()
    assert_apart(states(model, in_order(pixels, ORDER)), patches_in_order(name, states(model, pixels), ORDER))
    turn = [*VISION_HOSTS].index(name) % len(ENCODINGS)
    for encoding in ("none", *(ENCODINGS if name == "vit" else ENCODINGS[turn : turn + 1])):
        new, compare = patched(model, encoding), assert_close if encoding == "none" else assert_apart
        compare(states(new, in_order(pixels, ORDER)), patches_in_order(name, states(new, pixels), ORDER))


@torch.no_grad()
def test_order_of_patches_in_sam():
    """The test uses the output of SAM's layers, which keep patches by row and column, because SAM's neck sees order."""
    model, pixels = tiny("SamVisionModel", mlp_dim=48, output_channels=8, window_size=0), images()

    def behind_layers(which, given):
        seen = []
        layers = next(module for name, module in which.named_modules() if name.endswith("layers"))
        handle = layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))
        which(given)
        handle.remove()
        return (seen[0][0] if isinstance(seen[0], tuple) else seen[0]).flatten(1, 2)

    for encoding, implementation in itertools.product(("none", "sinusoidal", "rope", "alibi", "shaw"), ("eager", "sdpa")):
        new = patched(model, encoding)
        new.set_attn_implementation(implementation)
        compare = assert_close if encoding == "none" else assert_apart
        compare(behind_layers(new, in_order(pixels, ORDER)), behind_layers(new, pixels)[:, ORDER])


def with_vectors(model, vectors):
    """A copy of an original ViT whose own table holds these vectors of the patches, and zeros for the class token."""
    twin = copy.deepcopy(model)
    table = torch.cat([torch.zeros(1, vectors.shape[1]), vectors])[None]
    twin.embeddings.position_embeddings = torch.nn.Parameter(table)
    return twin


def test_vectors_are_of_patches_row_by_row():
    model, pixels = stock("vit"), images()
    vectors = sinusoids([range(PATCHES)], 32)[0]
    assert_close(states(hf_posenc.patch(model, "sinusoidal"), pixels), states(with_vectors(model, vectors), pixels))
    learned = patched(model, "learned")
    assert_close(states(learned, pixels), states(with_vectors(model, learned.posenc.weight.detach()), pixels))


@pytest.mark.parametrize("name", ["vit", "clip", "registers"])
def test_the_hosts_own_vectors(name):
    """A learned encoding with the original rows of patches changes only the positions of special tokens."""
    model, pixels = stock(name), images()
    table = next(p for n, p in model.named_parameters() if "position_embedding" in n)
    with torch.no_grad():
        table.view(-1, 32)[:1] = 0  # the class token's position
    assert_close(states(hf_posenc.patch(model, "learned", init="host"), pixels), states(model, pixels))


def test_vectors_are_of_patches_if_channels_come_first():
    """LW-DETR's embeddings are `[B, D, rows, columns]` until its layers cut them into windows."""
    model, pixels = build("lw_detr").backbone.backbone, torch.randn(1, 3, 32, 64)

    def embedded(encoding):
        found, patched = [], hf_posenc.patch(model, encoding)
        patched.encoder.register_forward_pre_hook(lambda module, args: found.append(args[0]))
        patched(pixels)
        return found[0]

    assert_close(embedded("sinusoidal") - embedded("none"), sinusoids([range(32)], 32), 1e-5)


def test_another_image_size():
    """The output equals that of the original model of this size with the sinusoids of as many patches in its own table."""
    model, pixels = stock("vit"), images(height=48, width=32)
    larger = stock("vit", image_size=[48, 32])
    larger.load_state_dict({n: p for n, p in model.state_dict().items() if "position" not in n}, strict=False)
    expected = states(with_vectors(larger, sinusoids([range(24)], 32)[0]), pixels)
    new = hf_posenc.patch(model, "sinusoidal")
    assert_close(states(new, pixels, interpolate_pos_encoding=True), expected)
    with pytest.raises(ValueError, match="24 positions.* max_length=16"):
        hf_posenc.patch(model, "alibi", max_length=PATCHES)(pixels, interpolate_pos_encoding=True)


@pytest.mark.parametrize("name", ["ViT", "Dinov2", "Swin"])
def test_another_image_size_than_an_oblong(name):
    """Transformers interpolates only square grids, so it would fail if disabled positions kept their shape."""
    sizes = SWIN | {"use_absolute_embeddings": True} if name == "Swin" else SIZES
    square, oblong = (tiny(f"{name}Model", **sizes | {"image_size": size}) for size in (32, [32, 48]))
    oblong.load_state_dict({n: p for n, p in square.state_dict().items() if "position" not in n}, strict=False)
    known = {} if name == "Dinov2" else {"interpolate_pos_encoding": True}
    got, expected = (states(hf_posenc.patch(each, "rope_2d"), images(height=48), **known) for each in (oblong, square))
    assert_equal(got, expected)


def scores(query, key, frequencies):
    """`[B, H, L, L]` of rotated queries and keys, computed with complex numbers. The first token isn't rotated."""
    length, half = query.shape[2], query.shape[3] // 2
    turned = []
    for given in (query, key):
        pairs = torch.complex(given[..., :half].double(), given[..., half:].double())
        for place, pair in itertools.product(range(1, length), range(half)):
            pairs[:, :, place, pair] *= torch.exp(torch.tensor(1j * (place - 1) * frequencies[pair]))
        turned.append(pairs)
    return torch.einsum("bhqe,bhke->bhqk", turned[0], turned[1].conj()).real


@torch.no_grad()
def test_rotation_leaves_the_class_token():
    model, pixels = stock("vit"), images(batch=1)
    new = hf_posenc.patch(model, "rope")
    new.set_attn_implementation("eager")
    got = new(pixels, output_attentions=True).attentions[0]
    layer, hidden = model.layers[0], hf_posenc.patch(model, "none").embeddings(pixels)
    normed = layer.layernorm_before(hidden)
    query, key = (
        project(normed).unflatten(-1, (4, 8)).transpose(1, 2) for project in (layer.attention.q_proj, layer.attention.k_proj)
    )
    expected = (scores(query, key, [10000 ** (-pair / 4) for pair in range(4)]) / 8**0.5).softmax(-1)
    assert_close(got, expected.float())


@torch.no_grad()
def test_biases_leave_the_class_token():
    model, pixels = stock("vit"), images(batch=1)
    bias = torch.zeros(1, 4, 17, 17)
    for head, i, j in itertools.product(range(4), range(PATCHES), range(PATCHES)):
        bias[0, head, i + 1, j + 1] = -(2.0 ** (-2 * (head + 1))) * abs(i - j)
    expected = hf_posenc.patch(model, "none")(pixels, attention_mask=bias)[0]
    assert_close(states(hf_posenc.patch(model, "alibi"), pixels), expected)


def bucket(distance):
    """T5's bucket, of 32 for both directions and distances up to 128."""
    steps = abs(distance)
    far = 8 + int(math.log(max(steps, 1) / 8) / math.log(128 / 8) * 8)
    return (16 if distance > 0 else 0) + (steps if steps < 8 else min(far, 15))


def score(encoding, attention, head, query, key, i, j):
    """The score of the query at position i of a window and the key at position j: their product, with the encoding's effect."""
    if encoding.startswith("rope"):
        angles_at = angles_of_cell if encoding == "rope_2d" else angles_of
        query, key = (turned(vector, angles_at(position, len(vector) // 2)) for vector, position in ((query, i), (key, j)))
    product = float(query @ key) / math.sqrt(len(query))
    if encoding == "alibi":
        return product - 2.0 ** (-8 * (head + 1) / attention.num_attention_heads) * abs(j - i)
    return product + float(attention.posenc.weight[bucket(j - i), head]) if encoding == "t5" else product


def angles_of(position, half):
    """RoPE's angles `[E/2]` at a position."""
    return position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)


def angles_of_cell(position, half):
    """Axial angles `[E/2]` of a patch in a window that is 4 patches wide: half by its row, half by its column."""
    row, column = position // SWIN["window_size"], position % SWIN["window_size"]
    steps = [100.0 ** (-2 * pair / half) for pair in range(half // 2)]
    return torch.tensor([*(row * step for step in steps), *(column * step for step in steps)], dtype=torch.float64)


def turned(vector, angles):
    """A vector `[E]` whose pairs of features are rotated by angles `[E/2]`."""
    first, second = vector.chunk(2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def by_loops(encoding, attention, tokens, size, shift):
    """The output of an attention in windows of `size` for tokens `[rows, columns, D]`, in float64.

    Zeros fill the last windows, and are visible. Then, all tokens are shifted up and to the left. Tokens that leave the image
    enter on the other side, where they don't see the others of their window.
    """
    tokens = tokens.double()
    height, width, features = tokens.shape
    rows, columns = (-(-side // size) * size for side in (height, width))
    filled = torch.zeros(rows, columns, features, dtype=torch.float64)
    filled[:height, :width] = tokens
    query, key, value = (
        copy.deepcopy(each).double()(filled).unflatten(-1, (attention.num_attention_heads, -1))
        for each in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    mixed = torch.zeros_like(value)
    for top, left in itertools.product(range(0, rows, size), range(0, columns, size)):
        places = [(top + i // size, left + i % size) for i in range(size**2)]
        origins = [((row + shift) % rows, (column + shift) % columns) for row, column in places]
        wrapped = [(row + shift >= rows, column + shift >= columns) for row, column in places]
        for (i, at), head in itertools.product(enumerate(origins), range(attention.num_attention_heads)):
            seen = [j for j in range(size**2) if wrapped[j] == wrapped[i]]
            scores = [score(encoding, attention, head, query[at][head], key[origins[j]][head], i, j) for j in seen]
            for j, weight in zip(seen, torch.tensor(scores, dtype=torch.float64).softmax(-1), strict=True):
                mixed[at][head] += weight * value[origins[j]][head]
    return copy.deepcopy(attention.o_proj).double()(mixed.flatten(2))[:height, :width]


@torch.no_grad()
@pytest.mark.parametrize(
    ("encoding", "height", "width"),
    [
        ("none", 20, 28),
        ("alibi", 20, 28),
        ("t5", 20, 28),
        ("rope", 20, 28),
        ("rope_2d", 20, 28),
        ("alibi", 16, 32),
        ("rope_2d", 16, 32),
        slow("t5", 16, 32),
    ],
)
def test_swin_by_loops(encoding, height, width):
    """This holds for complete and zero-filled windows, shifted or not. An image with the height of a window isn't shifted."""
    options = {"per_layer": True} if encoding == "t5" else {}
    model, normed, given = patched(stock("Swin", **SWIN), encoding, **options), {}, {}
    blocks = [(stage, block) for stage, layer in enumerate(model.encoder.layers) for block in layer.blocks]
    for _, block in blocks:
        # A block adds its attention's output to its input, and passes the sum to its second norm.
        block.layernorm_before.register_forward_hook(lambda module, args, output: normed.update({module: output[0]}))
        block.layernorm_after.register_forward_pre_hook(lambda module, args: given.update({module: args[0][0]}))
        block.register_forward_pre_hook(lambda module, args: given.update({module: args[0][0]}))
    model(images(1, height, width))
    for stage, block in blocks:
        tokens = normed[block.layernorm_before].unflatten(0, (height // 2 ** (stage + 1), width // 2 ** (stage + 1)))
        added = given[block.layernorm_after] - given[block]
        expected = by_loops(encoding, block.attention, tokens, block.window_size, block.shift_size)
        assert_close(added.double(), expected.flatten(0, 1), rtol=1e-3, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["Swin", "Swinv2", "DonutSwin", "MaskFormerSwin"])
def test_order_within_a_window(prefix):
    """The image has one window. There are no layers with shifted windows, and no stages that merge adjacent patches."""
    sizes = dict(SWIN, image_size=16, patch_size=4, depths=[1], num_heads=[2])
    # Swin also has a table, outside the layer stack that has the biases.
    model, pixels = stock(prefix, **sizes, use_absolute_embeddings=prefix == "Swin"), images(height=16, width=16)
    blocks = pixels.unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, ORDER]
    moved = blocks.unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    for encoding in ("none", *(("sinusoidal", "rope", "alibi", "shaw") if prefix == "Swin" else ("rope",))):
        new = patched(model, encoding)
        compare = assert_close if encoding == "none" else assert_apart
        compare(states(new, moved), states(new, pixels)[:, ORDER])


def test_stages_of_several_sizes():
    model = stock("Swin", **SWIN)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="per_layer=True"):
        hf_posenc.patch(model, "relative")
    new = patched(model, "relative", per_layer=True)
    new(images())[0].square().sum().backward()
    assert all(parameter.grad.any() for name, parameter in new.named_parameters() if "posenc." in name)
    with pytest.raises(hf_posenc.UnsupportedModelError, match=r"several widths \(\[16, 32\]\)"):
        hf_posenc.patch(model, "sinusoidal", inject="every_layer")


def test_patches_that_are_left_keep_their_positions():
    noise = torch.rand(2, PATCHES, generator=torch.Generator().manual_seed(2))
    model, pixels = stock("ViTMAE"), images()
    twin = copy.deepcopy(model)
    twin.embeddings.position_embeddings.data[0, 1:] = sinusoids([range(PATCHES)], 32)[0]
    twin.embeddings.position_embeddings.data[0, 0] = 0
    assert_close(states(hf_posenc.patch(model, "sinusoidal"), pixels, noise=noise), states(twin, pixels, noise=noise))
    all_left = stock("ViTMAE", mask_ratio=0.0)
    in_rows = torch.arange(PATCHES).expand(2, -1) / PATCHES
    for encoding in ("rope", "alibi", "shaw"):
        new = patched(all_left, encoding)
        expected, got = states(new, pixels, noise=in_rows), states(new, pixels, noise=noise)
        order = noise.argsort(dim=1)
        assert_close(got[:, 1:], expected[:, 1:].gather(1, order[..., None].expand(-1, -1, 32)))
    fixed = hf_posenc.unpatch(hf_posenc.patch(model, "alibi")).embeddings.position_embeddings
    assert not fixed.requires_grad  # as in the original model


def test_patches_left_out_unknown():
    model = stock("VideoMAE", num_frames=2, tubelet_size=1)
    video, masked = torch.randn(1, 2, 3, 32, 32), torch.zeros(1, 32, dtype=torch.bool)
    masked[0, :10] = True
    new = hf_posenc.patch(model, "alibi")
    assert states(new, video).shape == (1, 32, 32)
    with pytest.raises(ValueError, match="22 tokens instead of 32 patches"):
        new(video, bool_masked_pos=masked)


def test_frames_of_a_video():
    """TimeSformer attends over time at each location, and then within each frame, with a class token in every frame."""
    model = stock("Timesformer", num_frames=3)
    video, order = images(batch=6).unflatten(0, (2, 3)), [2, 0, 1]

    def by_frame(output):
        return output[:, 1:].unflatten(1, (PATCHES, 3))[:, :, order]

    for encoding in ("none", "sinusoidal", "rope", "alibi", "shaw"):
        new = patched(model, encoding)
        here, there = states(new, video), states(new, video[:, order])
        compare = assert_close if encoding == "none" else assert_apart
        compare(there[:, 1:].unflatten(1, (PATCHES, 3)), by_frame(here))


@pytest.mark.parametrize("encoding", ["sinusoidal", "rope", "alibi", "shaw"])
def test_images_in_one_row(encoding):
    """Qwen's vision model reads several images in one row. Each image has separate positions."""
    model = tiny("Qwen3VLVisionModel", deepstack_visual_indexes=[0])
    grids, patches = torch.tensor([[1, 4, 4], [2, 2, 6]]), torch.randn(40, 3 * 2 * 8 * 8)
    new = patched(model, encoding)
    together = states(new, patches, grid_thw=grids)
    assert_close(together[:16], states(new, patches[:16], grid_thw=grids[:1]))
    assert_close(together[16:], states(new, patches[16:], grid_thw=grids[1:]))
    assert_apart(states(new, patches[:16][ORDER], grid_thw=grids[:1]), together[:16][ORDER])


@pytest.mark.parametrize("encoding", ["sinusoidal", "rope", "alibi", "shaw"])
def test_smaller_images_of_a_batch(encoding):
    """Idefics pads images on the right and below. Their patches are counted as in a single image."""
    config = transformers.models.idefics3.Idefics3VisionConfig(**SIZES)
    model = randomize(transformers.models.idefics3.Idefics3VisionTransformer(config)).eval()
    new, pixels, shown = patched(model, encoding), images(), torch.zeros(2, 4, 4, dtype=torch.bool)
    shown[0], shown[1, :3, :2] = True, True
    together = states(new, pixels, patch_attention_mask=shown)
    alone = states(new, pixels[1:, :, :24, :16], patch_attention_mask=torch.ones(1, 3, 2, dtype=torch.bool))
    assert_close(together[1].unflatten(0, (4, 4))[:3, :2].flatten(0, 1), alone[0])


def test_what_a_silenced_table_answers():
    model = stock("vit").to(torch.bfloat16)
    new = hf_posenc.patch(model, "sinusoidal")
    table = new.embeddings.position_embeddings
    assert table.dtype == torch.bfloat16 and table.shape == (1, 17, 32) and not table.any()
    assert type(new.embeddings).__name__ == "ViTEmbeddings" and isinstance(new.embeddings, type(model.embeddings))
    assert "embeddings.position_embeddings" not in dict(new.named_parameters())
    assert_equal(new.posenc.original.embeddings.position_embeddings, model.embeddings.position_embeddings.data)
    without = hf_posenc.patch(model, "sinusoidal", keep_original=False)
    assert not any("host" in name for name in without.state_dict())
    assert states(without, images().to(torch.bfloat16)).dtype == torch.bfloat16
    scratch = hf_posenc.PosEncViTModel(hf_posenc.PosEncViTConfig(**SIZES, position_encoding="alibi"))
    assert not scratch.embeddings.position_embeddings.any()  # the original initialization draws a table


@pytest.mark.parametrize(("cut", "frames"), [(2, 2), (4, 2)])
def test_frames_are_as_many_as_were_cut(cut, frames):
    """Tokens of several grids belong to frames if as many images were cut. Otherwise, other tokens were appended to the patches
    (EoMT).
    """
    encoding = hf_posenc.patch(stock("vit"), "alibi").posenc
    unknown = torch.empty(0, 0, dtype=torch.long)
    context = PositionContext(encoding, unknown, 0, unknown, patches=PatchLayout((1, 0), grid=(5, 5), num_images=cut))
    assert_equal(context.with_length(1 + 25 * frames, unknown.device).positions, torch.arange(25 * frames)[None])
    with pytest.raises(ValueError, match="226 tokens"):
        context.with_length(1 + 25 * 9, unknown.device)
