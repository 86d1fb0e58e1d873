"""`extend` with a method: longer learned tables and rotary positions of original models, and rules that depend on the text's
length.

The tests compare them with float64 loops from the papers, torch's interpolation, and the rotary rules of Transformers.
"""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import AutoModel

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from conftest import run_python
from hf_posenc.encodings import PositionContext
from hf_posenc.encodings.self_extend import least_group as least_group_of
from hf_posenc.encodings.table_interpolation import STATIC, Extension
from models import BIASED, CACHE, HOSTS, LENGTH, TABLED, first, patched, rebuilt, slow, stock, tiny, tokens
from oracles import make

LONG = 2 * LENGTH + 13
OTHERS = {
    "opt": ("OPT", {}),
    "bart": ("Bart", {}),
    "clip-text": ("CLIPText", {}),
    "lilt": ("Lilt", dict(max_position_embeddings=LENGTH + 2, pad_token_id=1)),
    "gpt-neox": ("GPTNeoX", dict(hidden_size=64)),
    "cohere": ("Cohere", {}),
    "deepseek": ("DeepseekV3", dict(first_k_dense_replace=1)),
    "gptj": ("GPTJ", dict(rotary_dim=4)),
    "codegen": ("CodeGen", dict(rotary_dim=4)),
    "roformer": ("RoFormer", {}),
    "DebertaV2": ("DebertaV2", dict(position_biased_input=True, relative_attention=True)),
}
"""Models besides those of models.py: name -> prefix of the classes, changes of the config."""
TABLES = (*TABLED, "opt", "bart", "clip-text", "lilt")
"""The last four have tables that count positions themselves, or a second table."""
DYNAMIC = [name for name in TABLES if name not in (*BIASED, "gpt2", "opt", "clip-text", "lilt")]
"""Encoders whose only positions are a table."""


def made(name, head="Model", **changes):
    """An original model."""
    if name in HOSTS:
        return stock(name, head, **changes)
    prefix, own = OTHERS[name]
    model = tiny(prefix + head, **{**own, **changes})
    if name == "roformer":  # its sinusoids are a parameter that is never trained
        table = model.encoder.embed_positions
        with torch.no_grad():
            table.weight.copy_(table.create_weight())
    return model


def asked(model, ids, **others):
    """The first output of a model for tokens. The decoder of an encoder-decoder model gets a short text."""
    if model.config.is_encoder_decoder:
        others["decoder_input_ids"] = ids[:, :9]
    with torch.no_grad():
        return model(input_ids=ids, **others)[0]


def encoded(model, ids, **others):
    """The hidden states of an encoder, also in an encoder-decoder model."""
    with torch.no_grad():
        return (model.encoder if model.config.is_encoder_decoder else model)(input_ids=ids, **others)[0]


def table_rows(table, length, method, keep=20):
    """Longer tables in float64 loops, from the papers' formulas."""
    rows, longer = len(table), []
    for position in range(length):
        if method in ("tiled", "recurrent"):
            longer.append(table[position % rows])
        elif method == "grouped":
            longer.append(table[math.floor(position / math.ceil(length / rows))])
        elif method == "keep_first" and position < keep:
            longer.append(table[position])
        else:
            kept = keep if method == "keep_first" else 0
            place = kept + (position - kept) * (rows - 1 - kept) / (length - 1 - kept)
            below = min(int(place + 1e-9), rows - 1)
            above = min(below + 1, rows - 1)
            longer.append(table[below] + (place - below) * (table[above] - table[below]))
    return torch.stack(longer)


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1, LONG])
@pytest.mark.parametrize("method", STATIC)
def test_tables_by_the_formula(method, length):
    table = torch.randn(LENGTH, 5, generator=torch.Generator().manual_seed(0))
    longer = Extension(method, LENGTH, length).interpolate_table(table)
    assert longer.dtype == table.dtype and len(longer) == length
    if method == "cubic":
        image = table.double().T[None, :, :, None]
        expected = F.interpolate(image, size=(length, 1), mode="bicubic", align_corners=True)[0, :, :, 0].T
    else:
        expected = table_rows(table.double(), length, method)
    assert_close(longer.double(), expected)
    if method in ("linear", "cubic", "keep_first"):
        assert torch.equal(longer[[0, -1]], table[[0, -1]])
        assert_close(longer[: 20 if method == "keep_first" else 1], table[: 20 if method == "keep_first" else 1])
    if length == LENGTH:
        assert torch.equal(longer, table)


def test_rows_that_fall_on_rows_are_exact():
    table = torch.randn(9, 4)
    for method in ("linear", "cubic"):
        assert torch.equal(Extension(method, 9, 25).interpolate_table(table)[::3], table)
    assert torch.equal(Extension("keep_first", 9, 12, {"keep": 6}).interpolate_table(table)[:6], table[:6])


def own_tables(model):
    """The names of the absolute position embeddings in an original model."""
    names = r"(^|\.)((box_)?position_embeddings?|wpe|embed_positions)\.weight$"
    return {name for name, _ in model.named_parameters() if re.search(names, name)}


@pytest.mark.parametrize("name", TABLES)
def test_a_stock_model_stays_one(name):
    """The class stays the original one. Its table follows the formula, except the rows before the first position. All else is
    unchanged.
    """
    model = made(name)
    before = asked(model, tokens(length=LENGTH))
    longer = hf_posenc.extend(model, LONG, "linear")
    assert type(longer) is type(model) and not longer.training and hf_posenc.inspect(longer).max_length == LONG
    assert hf_posenc.inspect(model).max_length == LENGTH and torch.equal(asked(model, tokens(length=LENGTH)), before)
    tables = own_tables(model)
    assert tables
    for path, parameter in longer.named_parameters():
        old = model.get_parameter(path)
        if path not in tables:
            assert parameter is old, path
            continue
        offset = len(old) - LENGTH
        assert torch.equal(parameter[:offset], old[:offset]) and offset in (0, 2) and len(parameter) == LONG + offset
        assert_close(parameter[offset:], table_rows(old[offset:].double(), LONG, "linear").float())
    for text in (tokens(length=LONG), tokens(length=LENGTH)):
        assert_equal(asked(longer, text), asked(rebuilt(longer), text))
    # At the same length, the table is unchanged: `linear` maps the first and last position to themselves.
    same = hf_posenc.extend(model, LENGTH, "linear")
    assert_equal(asked(same, tokens(length=LENGTH)), before)


@pytest.mark.parametrize("method", STATIC)
def test_texts_see_the_longer_table(method):
    """The output equals that of an original model with the expected table."""
    model = stock("bert", "ForMaskedLM")
    longer = hf_posenc.extend(model, LONG, method)
    by_hand = stock("bert", "ForMaskedLM", max_position_embeddings=LONG)
    state = {name: value for name, value in model.state_dict().items() if "position_embeddings" not in name}
    by_hand.load_state_dict(state, strict=False)
    table = by_hand.bert.embeddings.position_embeddings.weight
    with torch.no_grad():
        old = model.bert.embeddings.position_embeddings.weight
        table.copy_(
            longer.bert.embeddings.position_embeddings.weight if method == "cubic" else table_rows(old.double(), LONG, method)
        )
    assert_close(asked(longer, tokens(length=LONG)), asked(by_hand, tokens(length=LONG)))


def test_other_processes_load_it(tmp_path):
    """Models that keep their original class load without this package. Stretched ones load with the rule in their config."""
    cases, stretched = [], []
    for name in ("roberta", "gpt2", "bart", "opt", "llama", "bert"):
        model, ids = made(name), tokens(length=LONG)
        longer = hf_posenc.extend(model, LONG, {"llama": "yarn", "bert": "dynamic"}.get(name, "cubic"))
        longer.save_pretrained(tmp_path / name)
        others = {"decoder_input_ids": ids[:, :9]} if longer.config.is_encoder_decoder else {}
        if name == "bert":
            stretched.append((name, tokens(length=LENGTH), asked(model, tokens(length=LENGTH)), ids, asked(longer, ids)))
        else:
            cases.append((name, type(model).__name__, {"input_ids": ids, **others}, asked(longer, ids)))
    torch.save((cases, stretched), tmp_path / "expected.pt")
    run_python("import longer_hosts_worker", tmp_path)


def test_what_carries_over():
    model = stock("gpt2", "LMHeadModel").train()
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.drop.p, model.name_or_path = 0.25, "somebody/base"
    longer = hf_posenc.extend(model.to(torch.bfloat16), LONG, "keep_first", keep=3)
    table = longer.transformer.wpe.weight
    assert table.dtype == torch.bfloat16 and not table.requires_grad and longer.transformer.wpe.num_embeddings == LONG
    assert longer.training and longer.transformer.drop.p == 0.25 and longer.name_or_path == "somebody/base"
    assert longer.lm_head.weight is longer.transformer.wte.weight is model.lm_head.weight
    assert torch.equal(table[:3], model.transformer.wpe.weight[:3])
    out = longer.eval().generate(tokens(length=LENGTH + 5), max_new_tokens=4, do_sample=False)
    assert out.shape[1] == LENGTH + 9
    assert not hf_posenc.extend(stock("bert").requires_grad_(False), LONG, "dynamic").posenc.weight.requires_grad
    again = hf_posenc.patch(longer, "alibi")  # the result is an ordinary original model
    assert hf_posenc.unpatch(again).config.n_positions == LONG


# Positions stretched to the length of each text.


@pytest.mark.parametrize("name", DYNAMIC)
def test_short_texts_keep_their_positions_bit_exactly(name):
    model = made(name)
    longer = hf_posenc.extend(model, LONG, "dynamic")
    for length in (1, 2, 9, LENGTH):
        assert torch.equal(asked(longer, tokens(length=length)), asked(model, tokens(length=length))), length
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 13:] = 0
    texts = [asked(each, tokens(length=LENGTH), attention_mask=mask) for each in (longer, model)]
    texts = [text[0] for text in texts] if model.config.is_encoder_decoder else [torch.cat([t[0], t[1, :13]]) for t in texts]
    assert torch.equal(*texts)
    assert hf_posenc.inspect(longer).max_length == LONG


@pytest.mark.parametrize("length", [LENGTH + 1, LONG])
@pytest.mark.parametrize("name", ["bert", "roberta", slow("albert"), "bart"])
def test_longer_texts_are_stretched_to_their_own_length(name, length):
    """The output equals that of an original model whose table was stretched to this length, also in a batch with
    shorter texts.
    """
    model = made(name)
    longer, ids = hf_posenc.extend(model, LONG, "dynamic"), tokens(length=length)
    assert_close(encoded(longer, ids), encoded(hf_posenc.extend(model, length, "linear"), ids))
    for before, behind in ((0, length - 9), (length - 9, 0)):
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, :before], mask[1, length - behind :] = 0, 0
        both = encoded(longer, ids, attention_mask=mask)
        assert_close(both[:1], encoded(longer, ids[:1]))
        assert_close(both[1, before : length - behind], encoded(model, ids[1:, before : length - behind])[0])


def test_biases_beside_a_stretched_table_stay(tmp_path):
    """MPNet's biases act as in its original attention, up to the order of sums."""
    model = made("mpnet")
    model.encoder.relative_attention_bias.requires_grad_(False)
    longer = hf_posenc.extend(model.train(), LONG, "dynamic")
    assert longer.training and all(module.training for module in longer.modules())
    assert [parameter.requires_grad for parameter in longer.posenc.parameters()] == [True, False]
    model.eval(), longer.eval()
    for length in (9, LENGTH):
        assert_close(asked(longer, tokens(length=length)), asked(model, tokens(length=length)), 1e-5)
    ids = tokens(length=41)
    assert_close(asked(longer, ids), asked(hf_posenc.extend(model, 41, "linear"), ids), 1e-5)
    longer.save_pretrained(tmp_path)
    assert torch.equal(asked(AutoModel.from_pretrained(tmp_path), ids), asked(longer, ids))
    assert torch.equal(asked(hf_posenc.unpatch(longer), tokens()), asked(model, tokens()))


def test_a_decoder_keeps_its_positions_beside_a_stretched_encoder():
    model = made("bart")
    longer = hf_posenc.extend(model, LONG, "dynamic")
    assert hf_posenc.inspect(longer).where == {"encoder": "learned"}
    with pytest.raises((IndexError, ValueError)):
        longer(input_ids=tokens(), decoder_input_ids=tokens(length=LENGTH + 5))


def test_a_stretched_table_is_trained_and_traced():
    model = hf_posenc.extend(stock("bert"), LONG, "dynamic").train()
    model(tokens(length=LONG))[0].sum().backward()
    gradient = model.posenc.weight.grad
    assert gradient.shape == (LENGTH, 32) and (gradient.abs().sum(1) > 0).all()
    packed = torch.cat([torch.arange(30), torch.arange(LONG - 30)])[None]
    assert first(model(tokens(1, LONG), position_ids=packed)).isfinite().all()


# Tables of the `learned` encoding.


@pytest.mark.parametrize(
    ("encoding", "method"),
    [("learned", "linear"), ("learned", "dynamic"), ("alibi+learned", "tiled"), ("alibi+learned", "dynamic")],
)
def test_a_learned_encoding(encoding, method, tmp_path):
    model = patched("bert", encoding, max_length=LENGTH)
    longer = hf_posenc.extend(model, LONG, method)
    part = longer.posenc if encoding == "learned" else longer.posenc.learned
    old = model.posenc if encoding == "learned" else model.posenc.learned
    assert type(longer) is type(model) and hf_posenc.inspect(longer).max_length == LONG
    if method == "dynamic":
        assert part.weight is old.weight
        assert torch.equal(first(longer(tokens(length=LENGTH))), first(model(tokens(length=LENGTH))))
    else:
        assert_close(part.weight, table_rows(old.weight.double(), LONG, method).float())
    longer.save_pretrained(tmp_path)
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens(length=LONG))), first(longer(tokens(length=LONG))))
    assert hf_posenc.unpatch(longer).config.max_position_embeddings == LENGTH
    if encoding == "alibi+learned":
        further = hf_posenc.extend(longer, 2 * LONG, method)
        assert hf_posenc.inspect(further).max_length == 2 * LONG
        rule = "linear" if method == "dynamic" else method
        vectors = further.posenc.learned("embed", torch.arange(2 * LONG))
        assert_close(vectors, table_rows(part.weight.double(), 2 * LONG, rule).float())


@pytest.mark.parametrize("storage", ["int8", "memory-mapped"])
def test_frozen_rows(storage, tmp_path):
    """They support only the method "dynamic", which doesn't change them."""
    if storage == "int8":
        model = hf_posenc.patch(stock("bert"), "learned", init="host", storage=storage)
    else:
        save_file({"rows": torch.randn(LENGTH, 32)}, tmp_path / "rows.safetensors")
        mapped = {"type": "learned", "storage": storage, "file": str(tmp_path / "rows.safetensors")}
        model = hf_posenc.patch(stock("bert"), mapped, max_length=LENGTH)
    words = r"storage='int8' freezes .*method='dynamic'" if storage == "int8" else r"\[24, 32\], .*\[61, 32\]"
    with pytest.raises(ValueError, match=words):
        hf_posenc.extend(model, LONG, "linear")
    longer = hf_posenc.extend(model, LONG, "dynamic")
    assert storage != "int8" or longer.posenc.values is model.posenc.values
    assert torch.equal(first(longer(tokens(length=LENGTH))), first(model(tokens(length=LENGTH))))
    longer.save_pretrained(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    assert torch.equal(first(again(tokens(length=LONG))), first(longer(tokens(length=LONG))))


def test_a_layer_with_a_table():
    layer = hf_posenc.PositionEmbedding("learned", 8, max_length=9)
    longer = hf_posenc.extend(layer, 20, "cubic")
    assert longer.posenc.weight.shape == (20, 8) and longer.config.max_length == 20 and layer.posenc.weight.shape == (9, 8)
    assert hf_posenc.extend(layer, 20, "dynamic")(torch.randn(1, 20, 8)).shape == (1, 20, 8)
    tables = hf_posenc.TokenPositionEmbedding(70, "learned", 8, max_length=5)
    assert hf_posenc.extend(tables, 11, "linear")(tokens()).shape == (2, 11, 8)


# Rotary positions.

FACTOR = 4
LISTS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
TRAINED = {"factor": 4.0, "original_max_position_embeddings": LENGTH}
RULES = {
    "linear": ({}, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": ({}, {"rope_type": "dynamic", "factor": 4.0}),
    "yarn": ({}, {"rope_type": "yarn", **TRAINED}),
    "longrope": (LISTS, {"rope_type": "longrope", "original_max_position_embeddings": LENGTH, **LISTS}),
    "llama3": ({}, {"rope_type": "llama3", **TRAINED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
}
"""Method of `extend` -> its settings, and the expected `rope_parameters` of Transformers."""


def by_hand(name, model, parameters, rows):
    """The original model of a config with these `rope_parameters`."""
    given = {**model.config.rope_parameters, **parameters}
    other = made(name, "ForCausalLM", rope_parameters=given, max_position_embeddings=rows)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("name", ["llama", "gpt-neox", "deepseek"])
def test_rules_are_transformers_own(name, method):
    """The class and logits equal those of Transformers. So do values that attentions read from the config, such as DeepSeek's
    scaling by the factor.
    """
    settings, parameters = RULES[method]
    if name != "llama" and method == "longrope":
        pytest.skip("its lists are as long as Llama's heads have pairs")
    model = made(name, "ForCausalLM")
    longer = hf_posenc.extend(model, FACTOR * LENGTH, method, **settings)
    rows = LENGTH if method == "dynamic" else FACTOR * LENGTH
    expected = by_hand(name, model, parameters, rows)
    assert type(longer) is type(model) and hf_posenc.inspect(longer).max_length == FACTOR * LENGTH
    assert all(parameter is model.get_parameter(path) for path, parameter in longer.named_parameters())
    before = asked(model, tokens(length=LENGTH))
    for length in (9, LENGTH, FACTOR * LENGTH):
        assert_close(asked(longer, tokens(length=length)), asked(expected, tokens(length=length)), 1e-5)
    assert torch.equal(asked(model, tokens(length=LENGTH)), before)
    assert hf_posenc.inspect(longer).options["rope_type"] == method
    if method in ("dynamic", "longrope"):
        return
    assert_apart(asked(longer, tokens(length=LENGTH)), before)


def test_ntk_by_the_formula():
    """theta · s^(R/(R - 2)) divides the lowest frequency by s, and keeps the highest. By default, s is twice the increase."""
    model = made("llama", "ForCausalLM")
    size, before = 8, model.model.rotary_emb.inv_freq
    for factor, settings in ((2 * FACTOR, {}), (FACTOR, {"factor": FACTOR})):
        longer = hf_posenc.extend(model, FACTOR * LENGTH, "ntk", **settings)
        theta = 10000.0 * factor ** (size / (size - 2))
        expected = torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)])
        assert_close(longer.model.rotary_emb.inv_freq, expected)
        assert_close(expected[-1] * factor, before[-1])
        assert expected[0] == before[0] == 1
        assert longer.config.rope_parameters == {"rope_type": "default", "rope_theta": pytest.approx(theta)}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"attention_factor": 1.5}),
        ("llama", {"beta_fast": 16.0, "beta_slow": 2.0}),
        ("llama", {"factor": 8.0}),
        ("deepseek", {"mscale": 1.0, "mscale_all_dim": 1.0}),
    ],
)
def test_settings_of_a_rule(name, settings):
    """DeepSeek multiplies its scores by a power of the factor, which its attentions compute in `__init__`."""
    model = made(name, "ForCausalLM")
    longer = hf_posenc.extend(model, FACTOR * LENGTH, "yarn", **settings)
    expected = by_hand(name, model, {**RULES["yarn"][1], **settings}, FACTOR * LENGTH)
    assert_close(asked(longer, tokens(length=60)), asked(expected, tokens(length=60)), 1e-5)
    if name == "deepseek":
        scaling = [each.model.layers[0].self_attn.scaling for each in (model, longer, expected)]
        assert scaling[0] < scaling[1] == scaling[2]
    else:
        scaling = settings.get("attention_factor", 0.1 * math.log(settings.get("factor", 4.0)) + 1)
        assert longer.model.rotary_emb.attention_scaling == scaling


def test_it_goes_on_from_the_length_of_training():
    model = made("llama", "ForCausalLM")
    for method in ("linear", "yarn", "dynamic", "llama3"):
        twice = hf_posenc.extend(hf_posenc.extend(model, 2 * LENGTH, method), FACTOR * LENGTH, method)
        once = hf_posenc.extend(model, FACTOR * LENGTH, method)
        assert twice.config.to_dict() == once.config.to_dict()
        assert torch.equal(asked(twice, tokens(length=60)), asked(once, tokens(length=60)))
    with pytest.raises(ValueError, match="rope_type='linear'.*method='linear'"):
        hf_posenc.extend(hf_posenc.extend(model, 2 * LENGTH, "linear"), FACTOR * LENGTH, "yarn")


@pytest.mark.parametrize("name", ["modernbert", "gemma3"])
def test_layers_of_windows_keep_their_rotations(name):
    model, far = stock("modernbert") if name == "modernbert" else tiny("Gemma3TextModel"), "full_attention"
    longer = hf_posenc.extend(model, FACTOR * LENGTH, "yarn")
    rules = {kind: each["rope_type"] for kind, each in longer.config.rope_parameters.items()}
    assert rules == {"sliding_attention": "default", far: "yarn"}
    for kind in rules:
        turned = [getattr(each, f"{kind}_inv_freq") for each in (rotary_of(model), rotary_of(longer))]
        assert torch.equal(*turned) == (kind != far)
    ids = tokens(length=FACTOR * LENGTH)
    assert_equal(first(longer(ids)), first(rebuilt(longer)(ids)))


def rotary_of(model):
    return next(module for path, module in model.named_modules() if path.endswith("rotary_emb"))


@pytest.mark.parametrize("name", ["gptj", slow("codegen"), "roformer"])
def test_rotations_that_no_config_changes(name):
    """`extend` patches the model with a `rope` that equals its own rotation, and sets the rule in it."""
    model = made(name)
    longer = hf_posenc.extend(model, FACTOR * LENGTH, "dynamic")
    assert hf_posenc.inspect(longer).encoding == "rope" and hf_posenc.inspect(longer).max_length == FACTOR * LENGTH
    assert_close(asked(longer, tokens(length=LENGTH)), asked(model, tokens(length=LENGTH)), 1e-5)
    options = hf_posenc.inspect(hf_posenc.extend(model, FACTOR * LENGTH, "yarn")).options
    assert (options["rope_type"], options["factor"], options["original_max_position_embeddings"]) == ("yarn", 4.0, LENGTH)
    assert options["layout"] == "interleaved"
    plain = hf_posenc.patch(
        model, "rope", **{key: options[key] for key in ("layout", "partial_rotary_factor") if key in options}
    )
    again = hf_posenc.extend(plain, FACTOR * LENGTH, "yarn")  # the same from a patched model
    assert hf_posenc.inspect(again).options == options
    ids = tokens(length=FACTOR * LENGTH)
    assert torch.equal(asked(again, ids), asked(hf_posenc.extend(model, FACTOR * LENGTH, "yarn"), ids))


# SelfExtend.


def self_extended(query, key, trained, window, group, theta=10000.0, causal=True, interleaved=False):
    """Scores [Q, K] of one head from the paper's formula, in float64."""
    size, count = query.shape[1], len(query)

    def turned(vector, position):
        out = vector.clone()
        for i in range(size // 2):
            angle = position * theta ** (-2 * i / size)
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + size // 2)
            a, b = vector[first], vector[second]
            out[first], out[second] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return out

    scores = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(i + 1 if causal else count):
            if count <= trained or abs(i - j) < window:
                places = i, j
            else:
                shift = window - window // group
                places = i // group + (shift if i > j else -shift), j // group
            scores[i, j] = turned(query[i], places[0]) @ turned(key[j], places[1]) / math.sqrt(size)
    return scores


def least_group(length, trained, window):
    """The smallest group size for which all distances in a text are below the trained length."""
    groups = range(1, length + 1)
    return next(group for group in groups if (length - 1) // group + window - window // group < trained)


@pytest.mark.parametrize(("trained", "window"), [(24, 6), (8, 2), (2048, 512), (2048, 1000)])
def test_the_least_group(trained, window):
    lengths = torch.arange(trained + 1, 8 * trained, max(1, trained // 500))
    groups = least_group_of(lengths, trained, window)
    assert groups.tolist() == [least_group(length, trained, window) for length in lengths.tolist()]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("length", "options"), [(8, {}), (9, {}), (23, {"layout": "interleaved"}), (23, {"window": 3, "group": 5})]
)
def test_grouped_scores_by_the_formula(length, options, causal):
    encoding = make("self_extend", heads=2, is_causal=causal, trained=8, **options)
    query, key = (torch.randn(1, 2, length, 8, dtype=torch.float64) for _ in range(2))
    window = options.get("window", 2)
    group = options.get("group") or least_group(length, 8, window)
    for past in (0, length - 2):
        positions = torch.arange(past, length)[None]
        context = PositionContext(encoding, positions, past=past, start=torch.zeros(1, 1, dtype=torch.long), scaling=8**-0.5)
        turned, _ = encoding.rotate(query[:, :, past:], None, context)
        _, keys = encoding.rotate(None, key, context.for_keys(length))
        scores, bias = turned @ keys.mT * 8**-0.5, encoding.score_bias(turned, keys, context)
        assert (bias is None) == (length <= 8)
        scores = scores if bias is None else scores + bias
        for head in range(2):
            layout = {"interleaved": "layout" in options}
            expected = self_extended(query[0, head], key[0, head], 8, window, group, causal=causal, **layout)[past:]
            assert_close(scores[0, head].tril(past) if causal else scores[0, head], expected, 1e-9)


@pytest.mark.parametrize("name", ["llama", slow("gpt-neox"), "cohere", "gptj", "roformer"])
def test_a_grouped_model(name, tmp_path):
    model = made(name)
    longer = hf_posenc.extend(model, FACTOR * LENGTH, "grouped")
    assert_close(asked(longer, tokens(length=LENGTH)), asked(model, tokens(length=LENGTH)), 1e-5)
    ids = tokens(length=FACTOR * LENGTH)
    whole = asked(longer, ids)
    assert_apart(whole, asked(hf_posenc.patch(model, "rope", **turning(longer)), ids))
    padding = torch.zeros(2, 7, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(ids[:, 7:])], dim=1)
    assert_close(
        asked(longer, torch.cat([padding + 3, ids[:, 7:]], dim=1), attention_mask=mask)[:, 7:], asked(longer, ids[:, 7:]), 1e-5
    )
    longer.save_pretrained(tmp_path)
    assert torch.equal(asked(AutoModel.from_pretrained(tmp_path), ids), whole)


def turning(model):
    options = hf_posenc.inspect(model).options
    return {name: options[name] for name in ("theta", "layout", "partial_rotary_factor") if name in options}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("ModernBert", dict(local_attention=12, layer_types=["sliding_attention", "full_attention"])),
        ("Gemma3Text", dict(sliding_window=6)),
        ("SmolLM3", dict(no_rope_layers=[0, 1])),
    ],
)
def test_grouped_where_layers_turn_in_several_ways(family, changes, tmp_path):
    """The first layer has a window or no rotation, and doesn't change. Tokens are grouped only in the second one."""
    model = tiny(f"{family}Model", **changes)
    longer = hf_posenc.extend(model, FACTOR * LENGTH, "grouped", window=5)
    assert hf_posenc.inspect(longer).options.get("self_extend", hf_posenc.inspect(longer).options)["window"] == 5
    short, ids = tokens(length=LENGTH), tokens(length=FACTOR * LENGTH)
    assert_close(asked(longer, short), asked(model, short), 1e-5)
    states = [each(ids, output_hidden_states=True).hidden_states for each in (longer, model)]
    assert_close(states[0][1], states[1][1], 1e-5)
    assert_apart(states[0][2], states[1][2])
    longer.save_pretrained(tmp_path)
    assert torch.equal(asked(AutoModel.from_pretrained(tmp_path), ids), asked(longer, ids))


def test_grouped_generation():
    """When a text grows over the trained length, each step groups all keys by the current length."""
    # With more layers, a cache also holds states of texts in smaller groups.
    longer = hf_posenc.extend(made("llama", "ForCausalLM", num_hidden_layers=1), FACTOR * LENGTH, "grouped", window=4)
    ids = tokens(length=LENGTH - 3)
    out = longer.generate(ids, max_new_tokens=20, do_sample=False)
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, longer(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        prompt = longer(tokens(length=60), use_cache=True)
        step = longer(tokens(length=60)[:, :1], **{CACHE: prompt.past_key_values}).logits
        whole = longer(torch.cat([tokens(length=60), tokens(length=60)[:, :1]], dim=1), use_cache=False).logits
    assert torch.equal(out, ids)
    assert_close(step[:, 0], whole[:, -1])


@pytest.mark.parametrize(("sliding", "settings"), [(None, {}), (None, {"group": 6}), (12, {"window": 5, "group": 6})])
def test_grouped_decoding(sliding, settings):
    """Decoding equals the forward pass beyond the old length, even if a cache keeps only a window of keys."""
    longer = hf_posenc.extend(tiny("MistralForCausalLM", sliding_window=sliding), FACTOR * LENGTH, "grouped", **settings)
    assert hf_posenc.inspect(longer).options["group"] == settings.get(
        "group", least_group(FACTOR * LENGTH, LENGTH, LENGTH // 4)
    )
    ids, prompt = tokens(length=50), 30
    with torch.no_grad():
        whole, out = longer(ids).logits, longer(ids[:, :prompt], use_cache=True)
        for place in range(prompt, 50):
            out = longer(ids[:, place : place + 1], **{CACHE: out.past_key_values})
            assert_close(out.logits[:, -1], whole[:, place])


# Rules in the config, and methods for one submodel.


def test_rules_in_force():
    """If the config has a trained length, it determines the factor. Otherwise, Transformers computes it."""
    lists = {**LISTS, "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LENGTH}
    model = made("llama", max_position_embeddings=FACTOR * LENGTH, rope_parameters=lists)
    scaling = model.rotary_emb.attention_scaling
    same = hf_posenc.extend(model, FACTOR * LENGTH, "longrope")
    assert same.rotary_emb.attention_scaling == scaling > 1
    assert torch.equal(asked(same, tokens(length=60)), asked(model, tokens(length=60)))
    with pytest.raises(ValueError, match="requires 'short_factor', 'long_factor', .*search"):
        hf_posenc.extend(model, 8 * LENGTH, "longrope")
    longer = hf_posenc.extend(model, 8 * LENGTH, "longrope", **LISTS)
    assert longer.rotary_emb.attention_scaling == pytest.approx(math.sqrt(1 + math.log(8) / math.log(LENGTH)))
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": LENGTH}
    model = made("llama", rope_parameters=yarn)  # as in Qwen 2.5: the config's length stays the trained length
    assert hf_posenc.extend(model, FACTOR * LENGTH, "yarn").config.rope_parameters["factor"] == 4.0


def test_lengths_of_dynamic_rotations():
    for before, after in ((12000, 13353), (49, 54)):
        longer = hf_posenc.extend(made("llama", max_position_embeddings=before), after, "dynamic")
        assert hf_posenc.inspect(longer).max_length == after and longer.config.max_position_embeddings == before


def test_an_encoder_longer_than_its_decoder():
    model = tiny("LEDModel", max_encoder_position_embeddings=32, max_decoder_position_embeddings=16, attention_window=4)
    longer = hf_posenc.extend(model, 64, "dynamic")
    assert longer.encoder.posenc.weight.shape == (32, 32)
    for length in (16, 24, 32):
        assert torch.equal(encoded(longer, tokens(length=length)), encoded(model, tokens(length=length)))
    with pytest.raises(ValueError, match="Pass 32 or more"):
        hf_posenc.extend(model, 20, "dynamic")
    with pytest.raises(hf_posenc.UnsupportedModelError, match="config specifies"):
        hf_posenc.extend(model, 64, "linear")


def test_a_part_of_a_model(tmp_path):
    """As in Long-CLIP, the whole model reloads without this package."""
    model = tiny("CLIPModel")
    longer = hf_posenc.extend(model, LONG, "keep_first", submodel="text_model")
    assert type(longer) is type(model) and longer.config.text_config.max_position_embeddings == LONG
    assert model.config.text_config.max_position_embeddings == LENGTH
    assert torch.equal(asked(longer.text_model, tokens(length=19)), asked(model.text_model, tokens(length=19)))
    longer.save_pretrained(tmp_path)
    again = transformers.CLIPModel.from_pretrained(tmp_path)
    assert torch.equal(asked(again.text_model, tokens(length=LONG)), asked(longer.text_model, tokens(length=LONG)))
    interpolate_table = hf_posenc.extend(model, LONG, "linear", submodel="text_model")
    assert_apart(asked(interpolate_table.text_model, tokens(length=19)), asked(model.text_model, tokens(length=19)))
    with pytest.raises(hf_posenc.UnsupportedModelError, match="several models.*submodel"):
        hf_posenc.extend(model, LONG, "linear")


# Invalid input.


@pytest.mark.parametrize(
    ("name", "length", "method", "settings", "words"),
    [
        ("bert", 9, "linear", {}, f"max_length=9 is below the current maximum length. Pass {LENGTH} or more"),
        ("bert", None, "linear", {}, "max_length=None.*method='linear'"),
        ("bert", 99, "lineer", {}, "method='lineer'.*linear"),
        ("bert", 99, ["linear"], {}, "method=.*linear"),
        ("bert", 99, "yarn", {}, "method='yarn'.*BertModel"),
        ("bert", 99, "linear", {"keep": 5}, "keep=5 .*method='linear'.* none"),
        ("bert", 99, "dynamic", {"keep": 5}, "keep=5 .*method='dynamic'.* none"),
        ("bert", 99, "keep_first", {"keep": LENGTH}, f"keep={LENGTH} .* from 0 to {LENGTH - 1}"),
        ("bert", 99, "keep_first", {"keep": "5"}, "keep='5' .*integer"),
        ("bert", 99, None, {"keep": 5}, "keep=5"),
        ("gpt2", 99, "dynamic", {}, "GPT2Model"),
        ("lilt", 99, "dynamic", {}, "layout_embeddings|deberta"),
        ("llama", 99, "cubic", {}, "method='cubic'.*LlamaModel"),
        ("gptj", 99, "cubic", {}, "method='cubic'"),
        ("llama", 99, "longrope", {}, "method='longrope' requires 'short_factor', 'long_factor'"),
        ("llama", 99, "linear", {"beta_fast": 3.0}, "beta_fast=3.0 .*method='linear'.* 'factor'"),
        ("llama", 99, "grouped", {"window": LENGTH}, f"window={LENGTH} .*below trained_length={LENGTH}"),
        ("deepseek", 99, "grouped", {}, "self_extend.*DeepseekV3Model"),
        ("llama", 99, "linear", {"factor": -1.0}, "factor=-1.0 isn't valid"),
        ("llama", 99, "linear", {"factor": "x"}, "factor='x' isn't valid"),
        ("llama", 99, "ntk", {"factor": -2.0}, "factor=-2.0 isn't valid"),
        ("llama", 96, "linear", {"factor": 3.0}, "factor=3.0 .*max_length=96, .*24 tokens.* at least 4"),
        ("llama", 96, "ntk", {"factor": 1}, "factor=1.0 .*max_length=96"),
        ("llama", 96, "dynamic", {"original_max_position_embeddings": 9}, "Its settings: none"),
        ("llama", 96, "grouped", {"group": 4}, "group=4 .*window=6 and max_length=96, .*24 tokens.* at least 6"),
        ("llama", 99, "dynamic", {"factor": 9.0}, "factor=9.0 .*method='dynamic'"),
        ("llama", 99, "longrope", {"short_factor": [1.0], "long_factor": [2.0]}, "has 1 values, .* 4 rotated pairs"),
        ("T5", 99, "linear", {}, "has no length limit"),
        ("Marian", 99, "linear", {}, "MarianModel has neither"),
        ("ViT", 99, "linear", {}, "pass image_size instead"),
        ("Qwen2VLText", 99, "grouped", {}, "Qwen2VLTextModel"),
        ("Gemma2", 99, "grouped", {}, "caps its scores at 50.0 before a bias is added"),
        ("Phi3", 99, "yarn", {}, "built with rope_parameters.*Choose another method: 'linear'"),
        ("DebertaV2", 99, "linear", {}, "'deberta' positions"),
        ("VisualBert", 99, "linear", {}, "would have shape"),
    ],
)  # fmt: skip
def test_refused(name, length, method, settings, words):
    model = made(name) if name in HOSTS or name in OTHERS else tiny(f"{name}Model")
    config, state = model.config.to_dict(), {path: value.clone() for path, value in model.state_dict().items()}
    with pytest.raises(hf_posenc.UnsupportedModelError if name[0].isupper() else ValueError, match=words):
        hf_posenc.extend(model, length, method, **settings)
    assert model.config.to_dict() == config
    assert all(torch.equal(value, state[path]) for path, value in model.state_dict().items())


def test_patched_models_that_no_method_suits():
    with pytest.raises(ValueError, match=r"alibi.*method='linear'.*hf_posenc\.extend"):
        hf_posenc.extend(patched("bert", "alibi", max_length=9), 20, "linear")
    with pytest.raises(ValueError, match="'rope' doesn't support method='cubic'"):
        hf_posenc.extend(patched("bert", "rope", max_length=9), 20, "cubic")
    with pytest.raises(ValueError, match="submodel='text_model' isn't a patched submodel.*Omit submodel"):
        hf_posenc.extend(patched("bert", "alibi", max_length=9), 20, submodel="text_model")
    interpolate_table = hf_posenc.extend(stock("bert"), LONG, "dynamic")
    with pytest.raises(ValueError, match="'learned'.*'dynamic'"):
        hf_posenc.extend(interpolate_table, 2 * LONG, "linear")
    with pytest.raises(ValueError, match=r"hf_posenc\.unpatch"):
        hf_posenc.extend(patched("llama", "rope"), 99, "grouped")
    with pytest.raises(ValueError, match="learned.trained_rows=30 .*max_length=24"):
        hf_posenc.patch(stock("bert"), "learned", trained_rows=30, max_length=24)


def test_a_trained_length_that_is_given():
    """The factor is computed from the given trained length."""
    model = made("llama", "ForCausalLM")
    longer = hf_posenc.extend(model, 96, "yarn", original_max_position_embeddings=12)
    assert longer.config.rope_parameters["factor"] == 8.0
    lists = hf_posenc.extend(model, 96, "longrope", **LISTS).config.rope_parameters
    assert isinstance(lists["short_factor"], list)


def test_a_grouped_model_is_made_longer():
    model = made("llama")
    once, twice = (hf_posenc.extend(model, length, "grouped", window=5) for length in (2 * LENGTH, FACTOR * LENGTH))
    again = hf_posenc.extend(once, FACTOR * LENGTH, "grouped")
    assert hf_posenc.inspect(again) == hf_posenc.inspect(twice)
    assert torch.equal(asked(again, tokens(length=90)), asked(twice, tokens(length=90)))


def test_a_rule_that_this_transformers_lacks(monkeypatch):
    from transformers import modeling_rope_utils

    known = {name: rule for name, rule in modeling_rope_utils.ROPE_INIT_FUNCTIONS.items() if name != "yarn"}
    monkeypatch.setattr(modeling_rope_utils, "ROPE_INIT_FUNCTIONS", known)
    with pytest.raises(ValueError, match="method='yarn' .*Transformers.* has 'linear', 'dynamic'"):
        hf_posenc.extend(made("llama"), 99, "yarn")


def test_methods_are_those_of_the_docstring():
    documented = {*re.findall(r'^ +"(\w+)" ', hf_posenc.extend.__doc__, re.M)}
    from hf_posenc.conversion.extension import METHODS

    assert documented | {"dynamic", "recurrent", "ntk", "yarn", "longrope", "llama3"} == {*METHODS}
    assert all(f'"{name}"' in hf_posenc.extend.__doc__ for name in METHODS)


# Tokenizers.


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("method", [pytest.param("linear", marks=pytest.mark.slow), "dynamic"])
def test_a_sentence_transformer(minilm, method, tmp_path):
    from sentence_transformers import SentenceTransformer

    original = SentenceTransformer(minilm, device="cpu")
    with pytest.raises(ValueError, match="decoder"):
        hf_posenc.extend(original, 540, method, where="decoder")
    longer = hf_posenc.extend(original, 540, method)
    assert longer.max_seq_length == longer.tokenizer.model_max_length == 540 and original.max_seq_length < 540
    short, long = ["A sentence."], ["word " * 530]
    vectors = longer.encode(short + long)
    if method == "dynamic":
        assert (longer.encode(short) == original.encode(short)).all()
    longer.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    again = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert again.max_seq_length == 540 and abs(again.encode(short + long) - vectors).max() < 1e-6


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_sentence_transformer_with_dynamic_rotations(tmp_path, tokenizer):
    """The config's length stays the trained length, and texts are truncated to the new maximum length."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    stock("modernbert").save_pretrained(tmp_path / "host")
    tokenizer.save_pretrained(tmp_path / "host")
    host = Transformer(str(tmp_path / "host"))
    longer = hf_posenc.extend(SentenceTransformer(modules=[host, Pooling(32)], device="cpu"), FACTOR * LENGTH, "dynamic")
    assert longer.max_seq_length == FACTOR * LENGTH
    longer.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    again = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    text = ["w1 w2 w3 w4 " * 20]
    assert again.max_seq_length == FACTOR * LENGTH and abs(again.encode(text) - longer.encode(text)).max() < 1e-6


def test_the_command(tmp_path, tokenizer):
    from typer.testing import CliRunner

    from hf_posenc.cli import app

    stock("bert").save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    run = CliRunner().invoke(
        app, ["extend", str(tmp_path / "bert"), "--max-length", "64", "--method", "keep_first", "--option", "keep=3",
              "--output-dir", str(tmp_path / "longer")],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    assert f"The tokenizer's model_max_length changed from {LENGTH} to 64" in run.output
    longer = AutoModel.from_pretrained(tmp_path / "longer")
    assert longer.config.max_position_embeddings == 64
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "longer").model_max_length == 64
    old = stock("bert").embeddings.position_embeddings.weight
    assert torch.equal(longer.embeddings.position_embeddings.weight[:3], old[:3])
    wrong = CliRunner().invoke(
        app, ["extend", str(tmp_path / "bert"), "--max-length", "64", "--output-dir", str(tmp_path / "other")]
    )
    assert wrong.exit_code and not (tmp_path / "other").exists()


def test_heads_too_small_for_another_theta():
    with pytest.raises(ValueError, match=r"method='dynamic' .*at least 4 .* 2\. Use 'linear'"):
        hf_posenc.extend(stock("llama", hidden_size=8, head_dim=2), LONG, "dynamic")
