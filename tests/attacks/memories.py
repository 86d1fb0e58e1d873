"""XLNet with memories, permutations, targets and its two kinds of masks.

A stock XLNet whose vectors of distances are zeros, with the encoding's bias in its mask or vectors in its embeddings, says what
is right.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, XLNetConfig

import hf_posenc
from attacks.cases import Case, Comparison, Settings, elsewhere, new_folder, no_grad
from attacks.seq2seq import ENCODINGS
from attacks.subjects import ITSELF, VOCABULARY, drawn, padded, tokens
from tools.hosts.tiny import randomized

SIZES: dict[str, Any] = {
    **{"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
KINDS: dict[str, dict[str, Any]] = {
    "two ways": {},
    "one way": {"attn_type": "uni"},
    "bi_data": {"bi_data": True},
    "clamped": {"clamp_len": 4},
    "same_length": {"attn_type": "uni", "same_length": True},
}
LENGTH = 11
IDS = torch.stack([tokens(LENGTH, 1), tokens(LENGTH, 2)])
TEXTS = [tokens(9, 1), tokens(6, 2)]


def permuted() -> Tensor:
    """`[B, L, L]`, 1 where a token doesn't see another: two orders of factorization."""
    masks = []
    for seed in range(2):
        rank = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed))
        masks.append((rank[:, None] < rank[None]).float())
    return torch.stack(masks)


def cases(settings: Settings) -> Iterator[Case]:
    attacks: dict[str, Callable[..., Iterator[Comparison]]] = {
        "as stock": alike, "perm_mask": orders, "input_mask": input_masks, "attention_mask": attention_masks,
        "token_type_ids": segments, "use_mems, the first text": first_memories, "mems": memories, "target_mapping": targets,
        "inputs_embeds": embeds, "generate": generated, "saved, and back": back,
    }  # fmt: skip
    for kind in KINDS:
        for encoding in (each for each in settings.encodings if each in ENCODINGS and each != ITSELF):
            for attack, run in attacks.items():
                yield Case(
                    f"{attack}, {kind}", "xlnet", encoding, no_grad(run, kind, encoding), functools.partial(taken, attack, kind)
                )


@torch.no_grad()
def taken(attack: str, kind: str) -> Any:
    """The same call of a stock model."""
    model, (ids, mask) = stock(kind, attack == "generate"), padded(TEXTS, "left")
    calls: dict[str, Callable[[], Any]] = {
        "perm_mask": lambda: model(IDS, perm_mask=permuted()),
        "input_mask": lambda: model(ids, input_mask=1.0 - mask),
        "attention_mask": lambda: model(ids, attention_mask=mask.float()),
        "target_mapping": lambda: model(IDS, perm_mask=permuted(), target_mapping=mapping()),
        "generate": lambda: model.generate(IDS, max_new_tokens=3, do_sample=False),
    }
    return calls.get(attack, lambda: True)()


def stock(kind: str, head: bool = False) -> Any:
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if head else AutoModel
    return randomized(auto.from_config(XLNetConfig(**SIZES, **KINDS[kind])).eval())


def made(kind: str, encoding: str, head: bool = False) -> Any:
    options: dict[str, Any] = {"max_length": 24} if any(name in encoding for name in ("learned", "normalized")) else {}
    return drawn(hf_posenc.patch(stock(kind, head), encoding, **options))


def right(kind: str, model: Any) -> Any:
    """A stock model that does what the patched one is to do, for all but rotations and biases by content; else None."""
    parts = list(model.posenc.named_parts().values())
    verbs = {verb for part in model.config.position_spec.parts.values() for verb in part.mechanisms()}
    if not verbs <= {"embed", "distance_bias"}:
        return None
    twin = stock(kind)
    twin.relative_positional_encoding = lambda queries, keys, bsz, device: torch.zeros(queries + keys, bsz, 32)

    def biased(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The mask is multiplied by -1e30 and added."""
        length = kwargs["output_h"].shape[0] if "output_h" in kwargs else args[0].shape[0]
        distance = torch.arange(length) - torch.arange(length)[:, None]
        terms = [part("distance_bias", distance.flatten()) for part in parts if "distance_bias" in part.mechanisms()]
        if terms:
            bias = sum(terms).view(-1, length, length).permute(1, 2, 0)[:, :, None].double() / -1e30
            given = kwargs.get("attn_mask_h")
            kwargs["attn_mask_h"] = bias.float() if given is None else bias.float() + given
        return args, kwargs

    def vectors(module: Any, args: Any, output: Tensor) -> Tensor:
        places = torch.arange(output.shape[0])[None]
        terms = [part("embed", places) for part in parts if "embed" in part.mechanisms()]
        return output + sum(terms).to(output.dtype).transpose(0, 1) if terms else output

    for layer in twin.layer:
        layer.register_forward_pre_hook(biased, with_kwargs=True)
    twin.word_embedding.register_forward_hook(vectors)
    return twin


def compared(kind: str, encoding: str, **given: Any) -> Iterator[Comparison]:
    model = made(kind, encoding)
    if twin := right(kind, model):
        yield model(IDS, **given)[0], twin(IDS, **given)[0]


def alike(kind: str, encoding: str) -> Iterator[Comparison]:
    return compared(kind, encoding)


def orders(kind: str, encoding: str) -> Iterator[Comparison]:
    return compared(kind, encoding, perm_mask=permuted())


def segments(kind: str, encoding: str) -> Iterator[Comparison]:
    return compared(kind, encoding, token_type_ids=(torch.arange(LENGTH) > 6).long().expand(2, -1))


def masks(kind: str, encoding: str, name: str) -> Iterator[Comparison]:
    """Texts beside padding, on either side, are what they are by themselves."""
    model = made(kind, encoding)
    for side in ("left", "right"):
        ids, mask = padded(TEXTS, side)
        output = model(ids, **{name: mask.float() if name == "attention_mask" else 1.0 - mask})[0]
        for row, shown, text in zip(output, mask.bool(), TEXTS, strict=True):
            yield row[shown], model(text.expand(2, -1))[0][0]  # two, of which bi_data reads one backward


def input_masks(kind: str, encoding: str) -> Iterator[Comparison]:
    """1 where there is padding."""
    return masks(kind, encoding, "input_mask")


def attention_masks(kind: str, encoding: str) -> Iterator[Comparison]:
    return masks(kind, encoding, "attention_mask")


def first_memories(kind: str, encoding: str) -> Iterator[Comparison]:
    model = made(kind, encoding)
    output = model(IDS, use_mems=True)
    yield output[0], model(IDS, use_mems=False)[0]
    if twin := right(kind, model):
        theirs = twin(IDS, use_mems=True).mems
        yield from zip(output.mems[1:], theirs[1:], strict=True)  # the first has no vectors yet


def memories(kind: str, encoding: str) -> Iterator[Comparison]:
    """A one-way XLNet reads on from its memories as it reads the whole; others see less of what was before."""
    model = made(kind, encoding)
    mems = model(IDS[:, :7], use_mems=True).mems
    output = model(IDS[:, 7:], use_mems=True, mems=mems)[0]
    if kind == "one way":
        yield output, model(IDS)[0][:, 7:]
    else:
        yield "no error", "an error"


def mapping() -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([[3, 5]] * 2), LENGTH).float()


def targets(kind: str, encoding: str) -> Iterator[Comparison]:
    made(kind, encoding)(IDS, perm_mask=permuted(), target_mapping=mapping())
    yield "no error", "an error"


def embeds(kind: str, encoding: str) -> Iterator[Comparison]:
    model = made(kind, encoding)
    yield model(inputs_embeds=model.get_input_embeddings()(IDS))[0], model(IDS)[0]


def generated(kind: str, encoding: str) -> Iterator[Comparison]:
    """`generate` asks for the token behind the text by a target_mapping."""
    model = made(kind, encoding, head=True)
    model.generate(IDS, max_new_tokens=3, do_sample=False)
    yield "no error", "an error"


def back(kind: str, encoding: str) -> Iterator[Comparison]:
    model, folder = made(kind, encoding), new_folder()
    model.save_pretrained(folder)
    loaded, unpatched = elsewhere(loaded_in, folder)
    yield loaded, model(IDS)[0]
    yield unpatched, stock(kind)(IDS)[0]


def loaded_in(folder: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        model = AutoModel.from_pretrained(folder)
        return model(IDS)[0], hf_posenc.unpatch(model)(IDS)[0]
