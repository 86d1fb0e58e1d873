"""`extend` with the method "windows": inputs of encoders read in overlapping windows, against loops over single windows."""

import math

import pytest
import torch
import transformers
from transformers import AutoModel

import hf_posenc
from closeness import assert_close
from conftest import run_python
from models import BIASED, LENGTH, patched, stock, tiny, tokens

LONG = 4 * LENGTH + 5
MODELS = {
    "bert": lambda: stock("bert"),
    "roberta": lambda: stock("roberta"),
    "mpnet": lambda: stock("mpnet"),
    "bart": lambda: stock("bart"),
    "roformer-like": lambda: tiny("EuroBertModel", max_position_embeddings=LENGTH),
    "alibi": lambda: patched("bert", "alibi", max_length=LENGTH),
    "relative": lambda: patched("bert", "relative", max_length=LENGTH),
}


def windows_of(size, window, stride, prefix, suffix):
    """The tokens of each window of a text, as indices, in loops from the definition."""
    if size <= window:
        return [list(range(size))]
    room, inner, found, start = window - prefix - suffix, size - prefix - suffix, [], 0
    while True:
        start = min(start, inner - room)
        found.append([*range(prefix), *range(prefix + start, prefix + start + room), *range(size - suffix, size)])
        if start == inner - room:
            return found
        start += stride


def expected(model, ids, window, stride, prefix=1, suffix=1):
    """The states `[L, D]` of one text `[L]`: each window by itself, and for each token the one whose edge is farthest."""
    windows = windows_of(len(ids), window, stride, prefix, suffix)
    with torch.no_grad():
        read = [model(input_ids=ids[None, each])[0][0] for each in windows]
    rows = []
    for token in range(len(ids)):
        places = [(number, each.index(token)) for number, each in enumerate(windows) if token in each]
        if len(windows) == 1 or token < prefix or token >= len(ids) - suffix:
            rows.append(torch.stack([read[number][place] for number, place in places]).double().mean(0).float())
            continue
        margins = []
        for number, place in places:
            left = math.inf if number == 0 else place - prefix
            right = math.inf if number == len(windows) - 1 else window - suffix - 1 - place
            margins.append(min(left, right))
        number, place = places[margins.index(max(margins))]
        rows.append(read[number][place])
    return torch.stack(rows)


def encoder_of(model):
    return model.get_encoder() if model.config.is_encoder_decoder else model


@pytest.mark.parametrize(
    "settings", [{}, dict(window=15), dict(stride=LENGTH - 2), dict(window=17, stride=5, prefix=2, suffix=0)]
)
@pytest.mark.parametrize("name", MODELS)
def test_each_token_comes_from_its_most_central_window(name, settings):
    """Texts of several lengths in a batch, padded on either side, give what each gives alone, window by window."""
    model = MODELS[name]()
    longer = hf_posenc.extend(model, LONG, "windows", **settings)
    assert hf_posenc.inspect(longer).max_length == LONG
    chosen = hf_posenc.inspect(longer).windows
    sizes = (LONG, chosen.window, chosen.window + 1, 3, 2 * LENGTH)
    ids = tokens(len(sizes), LONG)
    for side in ("right", "left"):
        mask = torch.zeros_like(ids)
        for row, size in enumerate(sizes):
            mask[row, slice(size) if side == "right" else slice(LONG - size, LONG)] = 1
        with torch.no_grad():
            given = encoder_of(longer)(input_ids=ids, attention_mask=mask)[0]
        for row, shown in enumerate(mask.bool()):
            goal = expected(encoder_of(model), ids[row, shown], chosen.window, chosen.stride, chosen.prefix, chosen.suffix)
            assert_close(given[row, shown], goal, 1e-5)
            assert not given[row, ~shown].any()


@pytest.mark.parametrize("name", MODELS)
def test_short_inputs_are_read_as_before(name):
    model = MODELS[name]()
    longer = hf_posenc.extend(model, LONG, "windows")
    with torch.no_grad():
        for length in (1, 9, LENGTH):
            given = encoder_of(longer)(input_ids=tokens(length=length))[0]
            before = encoder_of(model)(input_ids=tokens(length=length))[0]
            (assert_close if name in (*BIASED, "roformer-like") else torch.testing.assert_close)(given, before)
            assert name in (*BIASED, "roformer-like") or torch.equal(given, before)


def test_saved_and_loaded_elsewhere(tmp_path):
    model = stock("bert", "ForMaskedLM")
    longer, ids = hf_posenc.extend(model, LONG, "windows", stride=7), tokens(length=LONG)
    with torch.no_grad():
        torch.save((ids, longer(ids)[0], model(ids[:, :LENGTH])[0]), tmp_path / "expected.pt")
    longer.save_pretrained(tmp_path)
    code = """
import sys, torch
{}
from transformers import AutoModelForMaskedLM
ids, long, short = torch.load(sys.argv[1] + "/expected.pt")
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1]{})
with torch.no_grad():
    assert torch.equal(model(ids)[0], long)
{}
"""
    back = f"    assert torch.equal(hf_posenc.unpatch(model)(ids[:, :{LENGTH}])[0], short)"
    run_python(code.format("import hf_posenc", "", back), tmp_path)
    run_python(code.format("", ", trust_remote_code=True", "assert 'hf_posenc' not in sys.modules"), tmp_path)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"])
def test_heads_are_trained_through_windows(head):
    """Every token has a part in the loss of a head, and the heads of single tokens read the mean over windows."""
    longer = hf_posenc.extend(stock("bert", f"For{head}"), LONG, "windows").train()
    ids = tokens(length=LONG)[None] if head == "MultipleChoice" else tokens(length=LONG)
    embedded = longer.get_input_embeddings()(ids).detach().requires_grad_()
    out = longer(inputs_embeds=embedded)
    logits = out.start_logits if head == "QuestionAnswering" else out.logits
    (logits * torch.randn_like(logits)).sum().backward()
    assert (embedded.grad.abs().sum(-1) > 0).all()
    if head == "SequenceClassification":
        longer.eval()
        whole = longer.bert(ids)
        assert_close(whole.pooler_output, longer.bert.pooler(whole.last_hidden_state))
        assert_close(longer(ids).logits, longer.classifier(whole.pooler_output))


def test_a_question_is_in_every_window():
    """As in the usual overlapping spans, each of which begins with the question."""
    model = stock("bert")
    longer, ids = hf_posenc.extend(model, LONG, "windows", stride=9), tokens(1, LONG)
    types = torch.zeros_like(ids)
    types[:, 6:] = 1
    with torch.no_grad():
        given = longer(ids, token_type_ids=types)[0][0]
    room = LENGTH - 6 - 1
    stride = 9 * room // (LENGTH - 2)

    class Typed:
        def __call__(self, input_ids):
            return model(input_ids, token_type_ids=(torch.arange(input_ids.shape[1]) >= 6).long()[None])

    assert_close(given, expected(Typed(), ids[0], LENGTH, stride, prefix=6), 1e-5)


def test_outputs_and_arguments():
    model = stock("bert")
    longer, ids = hf_posenc.extend(model, LONG, "windows"), tokens(length=LONG)
    with torch.no_grad():
        full = longer(ids, output_hidden_states=True)
        assert len(full.hidden_states) == model.config.num_hidden_layers + 1
        assert torch.equal(full.hidden_states[-1], full.last_hidden_state)
        as_tuple = longer(ids, return_dict=False)
        assert type(as_tuple) is tuple and torch.equal(as_tuple[0], full.last_hidden_state)
        assert torch.equal(longer(inputs_embeds=longer.get_input_embeddings()(ids))[0], full.last_hidden_state)
    for wrong, name in (
        (dict(output_attentions=True), "output_attentions"),
        (dict(position_ids=torch.arange(LONG)[None]), "position_ids"),
        (dict(attention_mask=torch.ones(2, LONG, LONG)), "attention_mask"),
        (dict(attention_mask=torch.ones(2, 1, LONG, LONG)), "attention_mask"),
    ):
        with pytest.raises(ValueError, match=name):
            longer(ids, **wrong)
    with pytest.raises(ValueError, match=str(LONG + 1)):
        longer(tokens(length=LONG + 1))


@pytest.mark.parametrize(
    "settings",
    [dict(stride=0), dict(stride=LENGTH - 1), dict(window=2), dict(window=LENGTH + 1), dict(stride=2.5), dict(step=3)],
)
def test_wrong_settings(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        hf_posenc.extend(stock("bert"), LONG, "windows", **settings)


def test_models_without_windows():
    for made in (lambda: stock("gpt2"), lambda: stock("llama"), lambda: tiny("ViTModel"), lambda: patched("gpt2", "alibi")):
        with pytest.raises(ValueError) as error:
            hf_posenc.extend(made(), LONG, "windows", window=LENGTH)
        assert "window" in str(error.value) or error.value.reason
    with pytest.raises(hf_posenc.UnsupportedModelError) as error:
        hf_posenc.patch(stock("gpt2"), {"type": "alibi", "windows": dict(window=9, stride=3, prefix=1, suffix=1)})
    assert error.value.reason == "not an encoder of tokens"
    with pytest.raises(hf_posenc.UnsupportedModelError) as error:
        hf_posenc.to_stock(hf_posenc.extend(stock("bert"), LONG, "windows"))
    assert error.value.reason == "windows"


def test_a_patched_model_gets_windows_and_a_longer_limit():
    model = patched("bert", "alibi")
    longer = hf_posenc.extend(model, LONG, "windows", window=LENGTH)
    again = hf_posenc.extend(longer, 2 * LONG)
    assert hf_posenc.inspect(again).max_length == 2 * LONG and hf_posenc.inspect(again).windows.window == LENGTH
    with torch.no_grad():
        assert torch.equal(again(tokens(length=LONG))[0], longer(tokens(length=LONG))[0])
        text, chosen = tokens(1, 2 * LONG), hf_posenc.inspect(again).windows
        assert_close(again(text)[0][0], expected(model, text[0], chosen.window, chosen.stride, chosen.prefix, chosen.suffix))
    with pytest.raises(ValueError, match="window"):
        hf_posenc.extend(model, LONG, "windows")


def test_a_decoder_attends_to_merged_states():
    model = stock("bart", "ForConditionalGeneration")
    longer, ids = hf_posenc.extend(model, LONG, "windows"), tokens(length=LONG)
    out = longer.generate(ids, max_new_tokens=5, do_sample=False, min_new_tokens=5)
    states = expected(model.get_encoder(), ids[0], LENGTH, 3 * (LENGTH - 2) // 4)[None]
    given = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states)
    mask = torch.ones(1, LONG, dtype=torch.long)
    alone = model.generate(encoder_outputs=given, attention_mask=mask, max_new_tokens=5, do_sample=False, min_new_tokens=5)
    assert torch.equal(out[:1], alone)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_sentence_transformer(minilm):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(minilm, device="cpu")
    longer = hf_posenc.extend(model, 1024, "windows")
    assert longer.max_seq_length == longer.tokenizer.model_max_length == 1024
    text = " ".join(f"word{i} and more" for i in range(200))
    given = longer.encode([text, "short"], convert_to_tensor=True)
    ids = longer.tokenizer(text, return_tensors="pt")["input_ids"][0]
    goal = expected(AutoModel.from_pretrained(f"{minilm}").eval(), ids[:1024], 512, 382).mean(0)
    assert_close(given[0], torch.nn.functional.normalize(goal, dim=-1), 1e-5)
    assert_close(given[1], model.encode("short", convert_to_tensor=True), 1e-6)


def test_pooling_begins_with_the_first_token():
    """With padding on the left, the pooler reads the first token of each text, as without padding."""
    model = hf_posenc.extend(stock("bert"), LONG, "windows")
    ids = tokens(2, LONG - 5)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(LONG)[None] >= 5).expand(2, -1).long()
    with torch.no_grad():
        assert_close(model(input_ids=padded, attention_mask=mask).pooler_output, model(input_ids=ids).pooler_output)
