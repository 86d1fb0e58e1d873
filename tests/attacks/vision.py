"""Models of images at other sizes than they were made for, not square, of few patches and of more than 256; windows that shift.

A stock model of that size is right, whose attentions get the encoding's bias by their mask, or its own table of a window, and
whose embeddings get its vectors. For the other encodings it is a patched model that was made for that size.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModel

import hf_posenc
from attacks.cases import Case, Comparison, Settings, elsewhere, new_folder, no_grad
from attacks.seq2seq import ENCODINGS
from attacks.subjects import ITSELF, drawn
from tools.hosts.tiny import randomized

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8)
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
VITS: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit": ("ViT", SIZES, 1),
    "deit": ("DeiT", SIZES, 2),
    "dinov2": ("Dinov2", SIZES, 1),
    "dinov2, registers": ("Dinov2WithRegisters", dict(SIZES, num_register_tokens=4), 5),
    "clip": ("CLIPVision", SIZES, 1),
    "siglip": ("SiglipVision", SIZES, 0),
}
"""Name -> prefix of classes, config, tokens before the patches."""
SWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": ("Swin", SWIN),
    "swin, table": ("Swin", dict(SWIN, use_absolute_embeddings=True)),
    "swin, large windows": ("Swin", dict(SWIN, window_size=8)),
    "swinv2": ("Swinv2", SWIN),
}
HEIGHTS = ((32, 32), (48, 32), (16, 64), (16, 16), (36, 44), (136, 136), (8, 8), (8, 40))
"""Of the images: as made for, taller, wider, smaller, cut off by the patches, of 289 patches, of one, of one row."""
OF_WINDOWS = ((32, 32), (64, 32), (40, 24), (28, 36), (16, 64), (96, 96))
TWO_AXES = ("sinusoidal_2d", "rope_2d")


def cases(settings: Settings) -> Iterator[Case]:
    asked = [each for each in settings.encodings if each in ENCODINGS and each != ITSELF]
    if settings.encodings != (ITSELF,):
        asked += TWO_AXES
    for name in VITS:
        for encoding in asked:
            for size in HEIGHTS:
                run, stock = no_grad(sized, name, encoding, size), functools.partial(works, name, size)
                yield Case(f"{size[0]} x {size[1]}", name, encoding, run, stock)
            yield Case("sdpa and eager", name, encoding, no_grad(by_another, name, encoding))
    for name in SWINS:
        for encoding in asked:
            for size in OF_WINDOWS:
                run, stock = no_grad(in_windows, name, encoding, size), functools.partial(works, name, size)
                yield Case(f"{size[0]} x {size[1]}", name, encoding, run, stock)
            yield Case("training", name, encoding, functools.partial(trained, name, encoding))
            in_turn_too = functools.partial(works_in_turn, name)
            yield Case("sizes in turn", name, encoding, no_grad(in_turn, name, encoding), in_turn_too)
    for encoding in asked:
        for name in ("vit", "dinov2", "swin"):
            yield Case("saved, loaded, of another size", name, encoding, no_grad(saved, name, encoding))
        for name in ("vit", "swin"):
            yield Case("bool_masked_pos", name, encoding, no_grad(masked, name, encoding))
            yield Case("sizes in turn, compiled", name, encoding, no_grad(compiled, name, encoding), limit=300)


def sizes_of(name: str) -> tuple[str, dict[str, Any]]:
    return SWINS[name] if name in SWINS else VITS[name][:2]


def stock(name: str, head: str = "Model", **changes: Any) -> Any:
    prefix, sizes = sizes_of(name)
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, **changes})
    torch.manual_seed(0)
    return randomized(getattr(transformers, prefix + head)(config).eval())


def options_of(name: str, encoding: str) -> dict[str, Any]:
    options: dict[str, Any] = (
        {"max_length": 2500} if "learned" in encoding or name in SWINS and encoding == "normalized" else {}
    )
    per_layer = ("kerple", "t5", "fire", "relative")
    if name in SWINS:
        options |= {
            f"{part}__per_layer" if "+" in encoding else "per_layer": True for part in encoding.split("+") if part in per_layer
        }
    return options


def patched(name: str, encoding: str, model: Any = None, **options: Any) -> Any:
    model = stock(name) if model is None else model
    return drawn(hf_posenc.patch(model, encoding, **{**options_of(name, encoding), **options}))


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height + width))


def seen(model: Any, size: tuple[int, int]) -> Tensor:
    given = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in arguments(model) else {}
    return model(images(*size), **given)[0]


def arguments(model: Any) -> set[str]:
    import inspect

    return {*inspect.signature(type(model).forward).parameters}


@torch.no_grad()
def works(name: str, size: tuple[int, int]) -> None:
    seen(stock(name), size)


def sized(name: str, encoding: str, size: tuple[int, int]) -> Iterator[Comparison]:
    """One model on images of this size; others say what is right."""
    model = patched(name, encoding)
    output = seen(model, size)
    cells = tuple(side // 8 for side in size)
    if right := by_hooks(name, model, cells[0] * cells[1]):
        yield output, seen(right, size)
    if name in ("vit", "deit") or cells[0] == cells[1]:  # others take square images alone in their configs
        side: Any = cells[0] * 8 if cells[0] == cells[1] else [each * 8 for each in cells]
        other = stock(name, image_size=side)
        same = {key: value for key, value in stock(name).state_dict().items() if "position_embedding" not in key}
        other.load_state_dict(same, strict=False)
        made = patched(name, encoding, other)
        made.set_attn_implementation("eager")
        yield output, made(images(*size)[..., : cells[0] * 8, : cells[1] * 8])[0]


def by_hooks(name: str, model: Any, patches: int) -> Any:
    """A stock model with the encoding's vectors and biases, for those that have no others; else None."""
    verbs = {verb for part in model.config.position_spec.parts.values() for verb in part.mechanisms()}
    parts = [part for part in model.posenc.named_parts().values() if part.axes == 1]
    if not verbs <= {"embed", "distance_bias"} or len(parts) < len(model.config.position_spec.parts):
        return None
    twin, aside = stock(name), VITS[name][2]
    for key, table in twin.named_parameters():
        if "position_embedding" in key:
            table.zero_()
    distance = torch.arange(patches) - torch.arange(patches)[:, None]
    biases = [
        part("distance_bias", distance.flatten()).view(-1, patches, patches)
        for part in parts
        if "distance_bias" in part.mechanisms()
    ]
    terms = [part("embed", torch.arange(patches)[None]) for part in parts if "embed" in part.mechanisms()]

    def biased(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if biases:
            kwargs["attention_mask"] = torch.nn.functional.pad(sum(biases), (aside, 0, aside, 0))[None].float()
        return args[:1], kwargs

    def vectors(module: Any, args: Any, output: Any) -> Any:
        return output + torch.nn.functional.pad(sum(terms), (0, 0, aside, 0)).to(output.dtype) if terms else output

    twin.get_submodule("embeddings").register_forward_hook(vectors)
    for module in twin.modules():
        if type(module).__name__.endswith("Attention") and not isinstance(module, torch.nn.MultiheadAttention):
            module.register_forward_pre_hook(biased, with_kwargs=True)
    return twin


def by_another(name: str, encoding: str) -> Iterator[Comparison]:
    """With few patches and with many."""
    model, other = patched(name, encoding), patched(name, encoding)
    other.set_attn_implementation("eager")
    for size in ((48, 32), (136, 136)):
        yield seen(model, size), seen(other, size)


# Windows


def in_windows(name: str, encoding: str, size: tuple[int, int]) -> Iterator[Comparison]:
    model, other = patched(name, encoding), patched(name, encoding)
    output = seen(model, size)
    if name != "swinv2":  # which has one implementation
        other.set_attn_implementation("eager")
    yield output, seen(other, size)
    acts = {verb for part in model.config.position_spec.parts.values() for verb in part.mechanisms()}
    if (name.startswith("swin,") or name == "swin") and acts <= {"distance_bias"}:
        yield output, seen(by_table(name, model), size)


def by_table(name: str, model: Any) -> Any:
    """A stock Swin whose own biases in a window are those of the encoding, counted row by row.

    Swin's table counts the query's position minus the key's, an encoding's distance the key's minus the query's. An attention
    with as many heads as the stack's encoding, here one of the first stage, shares that encoding if it has no `per_layer`;
    other attentions have one of their own.
    """
    twin = stock(name)
    if (vectors := twin.embeddings.position_embeddings) is not None:
        vectors.zero_()
    shared = next((module.posenc for module in (model, model.encoder) if hasattr(module, "posenc")), None)
    ours = [block.attention for stage in model.encoder.layers for block in stage.blocks]
    theirs = [block.attention for stage in twin.encoder.layers for block in stage.blocks]
    for mine, other in zip(ours, theirs, strict=True):
        table = other.relative_position_bias.relative_position_bias_table
        side = (int(table.shape[0] ** 0.5) + 1) // 2
        steps = torch.arange(1 - side, side)
        distance = -(side * steps[:, None] + steps).flatten()
        table.zero_()
        for part in getattr(mine, "posenc", shared).named_parts().values():
            if "distance_bias" in part.mechanisms():
                table += part("distance_bias", distance).T
    return twin


def in_turn(name: str, encoding: str) -> Iterator[Comparison]:
    """Images of one size tell nothing of the next."""
    model = patched(name, encoding)
    for size in (*OF_WINDOWS, *OF_WINDOWS[::-1]):
        yield seen(model, size), seen(patched(name, encoding), size)


@functools.cache
@torch.no_grad()
def works_in_turn(name: str) -> bool:
    """False for a stock Swin: an image no larger than a window turns off its shift for all that follow."""
    model = stock(name)
    return all(
        torch.allclose(seen(model, size), seen(stock(name), size), atol=1e-4) for size in (*OF_WINDOWS, *OF_WINDOWS[::-1])
    )


def trained(name: str, encoding: str) -> Iterator[Comparison]:
    """All gradients, with gradient checkpointing and without."""
    gradients = []
    for checkpointing in (False, True):
        model = patched(name, encoding)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():
                if hasattr(module, "drop_prob"):
                    module.drop_prob = 0.0
            model.train()
        seen(model, (64, 32)).square().sum().backward()
        gradients.append({key: value.grad for key, value in model.named_parameters() if value.grad is not None})
    yield sorted(gradients[0]), sorted(gradients[1])
    largest = max(float(each.abs().max()) for each in gradients[0].values())
    for key, gradient in gradients[0].items():
        if float(gradient.abs().max()) > 1e-3 * largest:
            yield gradients[1][key], gradient


# Both


def saved(name: str, encoding: str) -> Iterator[Comparison]:
    model, folder = patched(name, encoding), new_folder()
    model.save_pretrained(folder)
    loaded, unpatched = elsewhere(loaded_in, folder)
    yield loaded, seen(model, (64, 32))
    yield unpatched, seen(stock(name), (64, 32))


def loaded_in(folder: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        model = AutoModel.from_pretrained(folder)
        return seen(model, (64, 32)), seen(hf_posenc.unpatch(model), (64, 32))


def masked(name: str, encoding: str) -> Iterator[Comparison]:
    """Masked patches keep their positions: where a mask token is what a patch is, nothing changes."""
    model = stock(name, "ForMaskedImageModeling")
    model = patched(name, encoding, model)
    embeddings, patches = model.base_model.embeddings, 16 if name == "vit" else 256
    chosen = torch.zeros(2, patches, dtype=torch.bool)
    chosen[:, ::3] = True
    pixels = images(32, 32)
    with_token = model.base_model(pixels, bool_masked_pos=chosen)[0]
    token = embeddings.mask_token

    def replaced(module: Any, args: Any, output: Any) -> Any:
        hidden, *others = output if isinstance(output, tuple) else (output,)
        hidden = torch.where(chosen[:, :, None], token.expand(2, patches, -1), hidden)
        return (hidden, *others) if isinstance(output, tuple) else hidden

    hook = embeddings.patch_embeddings.register_forward_hook(replaced)
    if name == "swin":
        hook.remove()
        hook = embeddings.norm.register_forward_hook(replaced)
    yield with_token, model.base_model(pixels)[0]
    hook.remove()


def compiled(name: str, encoding: str) -> Iterator[Comparison]:
    """A graph for each size, or one for all, as torch.compile has it."""
    model, other = patched(name, encoding), patched(name, encoding)
    torch._dynamo.reset()
    run: Callable[..., Any] = torch.compile(copy.deepcopy(model), backend="eager")
    given = {"interpolate_pos_encoding": True}
    for size in ((32, 32), (48, 32), (64, 64), (136, 136)) if name == "vit" else ((32, 32), (64, 32), (40, 24)):
        yield run(images(*size), **given)[0], seen(other, size)
