"""The pairs of a model and an encoding that stand for all pairs."""

from models import ALL_HOSTS, ALL_WAYS, CONFIGURED, GRIDS, VARIANTS, suits

MECHANISMS = ("sinusoidal", "rope", "alibi", "shaw", ALL_WAYS)
"""One encoding for each mechanism, and one with several."""
KINDS = ("bert", "gpt2", "llama", "bart", "vit", "wav2vec2")
"""One model of each kind: an encoder, decoders with a position table and with RoPE, an encoder-decoder, images, audio."""
ALL_VARIANTS = (*VARIANTS, *CONFIGURED, *GRIDS, "sinusoidal_2d+alibi")


def cover() -> list[tuple[str, str]]:
    """Each model with each mechanism, and each encoding on one model of each kind."""
    pairs = [(host, encoding) for host in ALL_HOSTS for encoding in MECHANISMS]
    pairs += [(host, encoding) for host in KINDS for encoding in ALL_VARIANTS]
    return _sorted(pair for pair in pairs if suits(*pair))


def quick() -> list[tuple[str, str]]:
    """The pairs of `make test`: each model of another structure with several mechanisms, and each encoding on one model."""
    structures = {ALL_HOSTS[host].structure: host for host in reversed(ALL_HOSTS)}
    pairs = [(host, ALL_WAYS) for host in structures.values()]
    for turn, encoding in enumerate(ALL_VARIANTS):
        hosts = [host for host in ("bert", "gpt2", "llama") if suits(host, encoding)] or ["vit"]
        pairs.append((hosts[turn % len(hosts)], encoding))
    return _sorted(pairs)


def six() -> list[tuple[str, str]]:
    """One model of each kind with several mechanisms."""
    return [(host, ALL_WAYS) for host in KINDS]


def _sorted(pairs) -> list[tuple[str, str]]:
    """Without repetition, by model, of which a test process then builds one after the other."""
    order = {host: place for place, host in enumerate(ALL_HOSTS)}
    return sorted(dict.fromkeys(pairs), key=lambda pair: order[pair[0]])
