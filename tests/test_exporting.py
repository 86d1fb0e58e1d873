"""to_stock and hf-posenc export: the same function as a class of Transformers, loaded without this package."""

import json

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from transformers import BertTokenizer

import hf_posenc
from closeness import assert_apart, assert_close
from conftest import WORDS, run_python
from models import patched, randomize_encoding, slow, stock, tiny, tokens

HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
ENCODERS = ("Bert", "Ernie", "Roberta", "Data2VecText", "Electra", "DistilBert", "MPNet")
ALIKE = ("Ernie", "Data2VecText")
"""Built like Bert and Roberta."""
CLASSES = {("rope", "half"): "JinaEmbeddingsV3", ("rope", "interleaved"): "RoFormer", ("t5", None): "MPNet"}
CLASSIFIER, QUESTIONS, CHOICES = "ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice"
NONE = {
    **{(host, CLASSIFIER, "interleaved"): "head of RoFormer uses gelu" for host in ENCODERS if host != "Electra"},
    **{("DistilBert", CLASSIFIER, layout): "uses .*relu" for layout in ("half", "interleaved", None)},
    ("Electra", CLASSIFIER, "half"): "head of JinaEmbeddingsV3 uses tanh.*gelu",
    ("Electra", CLASSIFIER, None): "head of MPNet uses tanh",
    **{(host, QUESTIONS, None): "MPNet has no token types.* question" for host in ("Bert", "Ernie", "Electra")},
    **{(host, CHOICES, None): "MPNet has no token types.* choice" for host in ("Bert", "Ernie")},
    **{(host, CHOICES, "half"): "JinaEmbeddingsV3 has no counterpart" for host in ENCODERS},
    ("DistilBert", CHOICES, None): "head of MPNet uses tanh.*relu",
    ("Electra", CHOICES, None): "head of MPNet uses tanh.*gelu",
}
RELOAD = """
import sys, torch, transformers
kind, folder, file = sys.argv[1:]
inputs, expected = torch.load(file)
model = getattr(transformers, kind).from_pretrained(folder).eval()
with torch.no_grad():
    found = model(**inputs)
assert not any(name.startswith("hf_posenc") for name in sys.modules)
for key, value in expected.items():
    torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
"""


def export(name, encoding, **options):
    sizes = {"type_vocab_size": 1} if name.startswith(("Roberta", "Data2VecText")) else {}
    sizes |= {"relative_attention_num_buckets": 32} if name.startswith(("MPNet", "T5")) else {}
    model = randomize_encoding(hf_posenc.patch(tiny(name, **sizes), encoding, **options)).eval()
    return model, hf_posenc.to_stock(model)


def equal(model, stock, length=19, **more):
    """Both give the same for a batch with padding on the right."""
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1, length - 7 :] = 0
    inputs = {"input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id or 0), "attention_mask": mask, **more}
    if "MultipleChoice" in type(model).__name__:
        inputs = {name: value[None] for name, value in inputs.items()}
    return compared(model, stock, inputs, mask)


def compared(model, stock, inputs, mask):
    """The inputs and the equal outputs of both."""
    with torch.no_grad():
        ours, theirs = model(**inputs), stock(**inputs)
    found = {}
    for key, value in ours.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and theirs.get(key) is not None:
            shown = mask.bool() if value.shape[:2] == mask.shape else slice(None)
            assert_close(theirs[key][shown], value[shown])
            found[key] = theirs[key]
    assert found
    return inputs, found


@pytest.mark.filterwarnings("ignore:MPNet has no token types")
@pytest.mark.parametrize(("encoding", "layout"), CLASSES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("host", [slow(host) if host in ALIKE else host for host in ENCODERS])
def test_encoders(host, head, encoding, layout):
    options = {} if layout is None else {"layout": layout}
    if reason := NONE.get((host, head, layout)):
        with pytest.raises(hf_posenc.UnsupportedModelError, match=reason) as refused:
            export(host + head, encoding, **options)
        assert refused.value.reason == "no equivalent stock class" and "Nearest: " in str(refused.value)
        return
    model, stock = export(host + head, encoding, **options)
    assert type(stock).__name__ == CLASSES[encoding, layout] + head and type(stock).__module__.startswith("transformers.")
    equal(model, stock)


def test_choices_with_token_types():
    """RoFormer's head takes BERT's activation, and both read pairs of texts."""
    model, stock = export("BertForMultipleChoice", "rope", layout="interleaved")
    assert stock.config.summary_activation == "tanh"
    equal(model, stock, token_type_ids=torch.arange(19).ge(9).long().expand(2, -1))


def test_task_types():
    with pytest.raises(hf_posenc.UnsupportedModelError, match="Ernie has task types"):
        hf_posenc.to_stock(hf_posenc.patch(tiny("ErnieModel", use_task_id=True), "rope"))


def each_in_turn(names, encodings):
    """All pairs. The first model has every encoding, and the others one each in `make test`."""
    quick = {(name, encodings[turn % len(encodings)]) for turn, name in enumerate(names)}
    pairs = [(name, encoding) for name in names for encoding in encodings]
    return [pair if pair in quick or pair[0] == names[0] else slow(*pair) for pair in pairs]


IMAGES = ["ViTModel", "DeiTForImageClassification", "CLIPVisionModel", "SiglipVisionModel"]
IMAGES += ["Dinov2WithRegistersModel", "YolosModel"]


@pytest.mark.parametrize(
    ("name", "encoding"),
    each_in_turn(IMAGES, ["sinusoidal_2d", "sinusoidal+sinusoidal_2d", "learned", "sinusoidal", "none"]),
)
def test_images(name, encoding):
    """The tables of vision models are filled. Extra tokens, such as class tokens, get zeros."""
    model = randomize_encoding(hf_posenc.patch(tiny(name), encoding)).eval()
    stock = hf_posenc.to_stock(model)
    assert type(stock) is type(model).original_class
    size = model.config.image_size if isinstance(model.config.image_size, (list, tuple)) else [model.config.image_size] * 2
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    compared(model, stock, {"pixel_values": images}, torch.ones(0, 0))
    if encoding != "none":  # positions have an effect
        assert_apart(stock(images)[0], hf_posenc.to_stock(hf_posenc.patch(tiny(name), "none").eval())(images)[0])


def test_oblong_images():
    model = hf_posenc.patch(tiny("ViTModel", image_size=(16, 24)), "sinusoidal_2d").eval()
    images = torch.randn(2, 3, 16, 24)
    compared(model, hf_posenc.to_stock(model), {"pixel_values": images}, torch.ones(0, 0))


@pytest.mark.parametrize("encoding", ["none", "t5"])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "T5EncoderModel", "MPNetModel", "BeitModel"])
def test_biases(name, encoding):
    """Biases of the original class get those of the encoding, or zeros."""
    sizes = {"use_relative_position_bias": True} if name == "BeitModel" else {}
    options = {"max_distance": 77} if encoding == "t5" and name.startswith("T5") else {}
    if name == "BeitModel" and encoding == "t5":
        with pytest.raises(hf_posenc.UnsupportedModelError, match="Nearest: none keeps the class"):
            hf_posenc.to_stock(hf_posenc.patch(tiny(name, **sizes), encoding))
        return
    if name == "MPNetModel":
        sizes = {"relative_attention_num_buckets": 32}
    model = randomize_encoding(hf_posenc.patch(tiny(name, **sizes), encoding, **options)).eval()
    stock = hf_posenc.to_stock(model)
    assert type(stock) is type(model).original_class
    assert not options or stock.config.relative_attention_max_distance == 77
    if name == "BeitModel":
        images = torch.randn(2, 3, model.config.image_size, model.config.image_size)
        compared(model, stock, {"pixel_values": images}, torch.ones(0, 0))
    else:
        equal(model, stock, **({"decoder_input_ids": tokens(2, 9)} if "Generation" in name else {}))


TABLES = ["BertForMaskedLM", "RobertaModel", "ElectraModel", "DistilBertModel", "GPT2LMHeadModel", "OPTForCausalLM"]
TABLES += ["BartForConditionalGeneration"]


@pytest.mark.parametrize(("name", "encoding"), each_in_turn(TABLES, ["sinusoidal", "none", "learned", "sinusoidal+fourier"]))
def test_tables(name, encoding):
    """Additive encodings fill the table of the original class, of any length."""
    model = randomize_encoding(hf_posenc.patch(tiny(name), encoding, max_length=33)).eval()
    stock = hf_posenc.to_stock(model)
    assert type(stock) is type(model).original_class
    equal(model, stock, 33)
    if encoding != "none":
        assert_apart(stock(tokens(2, 19))[0], stock(tokens(2, 19).flip(1))[0].flip(1))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("LlamaForCausalLM", {"theta": 77.0}, "LlamaForCausalLM"),
        ("LlamaForCausalLM", {"theta": 77.0, "layers": [0]}, "SmolLM3ForCausalLM"),
        ("Qwen3ForCausalLM", {"rope_type": "linear", "factor": 3.0}, "Qwen3ForCausalLM"),
        ("GPTNeoXForCausalLM", {"theta": 500.0}, "GPTNeoXForCausalLM"),
        ("MistralModel", {"theta": 500.0}, "MistralModel"),
        ("PhiForCausalLM", {"theta": 500.0}, "PhiForCausalLM"),
        ("PhiForCausalLM", {"partial_rotary_factor": 0.5}, "PhiForCausalLM"),
        ("ModernBertForMaskedLM", {"theta": 500.0}, "ModernBertForMaskedLM"),
        ("Gemma3ForCausalLM", {"theta": 500.0}, "Gemma3ForCausalLM"),
        ("SmolLM3ForCausalLM", {"layers": [1]}, "SmolLM3ForCausalLM"),
        ("BertModel", {"theta": 500.0, "rope_type": "linear", "factor": 2.0}, "JinaEmbeddingsV3Model"),
    ],
    ids=str,
)
def test_rotations(name, options, expected):
    model = hf_posenc.patch(tiny(name), "rope", **options).eval()
    stock = hf_posenc.to_stock(model)
    assert type(stock).__name__ == expected
    equal(model, stock)


def test_without_rotation():
    model, stock = export("LlamaForCausalLM", "none")
    assert type(stock).__name__ == "SmolLM3ForCausalLM" and not any(stock.config.no_rope_layers)
    equal(model, stock)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "PhiForCausalLM", "CohereForCausalLM", "ModernBertModel"])
def test_angles_without_effect(name):
    """Classes with rotary parameters keep their class without positions: all angles round to 0."""
    model, stock = export(name, "none")
    assert type(stock) is type(model).original_class
    equal(model, stock)
    far = torch.arange(19)[None] + 100_000
    with torch.no_grad():
        assert_close(stock(tokens(1, 19), position_ids=far)[0], stock(tokens(1, 19))[0])


@pytest.mark.parametrize(
    ("name", "encoding", "options", "words"),
    [
        ("BertModel", "t5", {"per_layer": True}, "one table of biases"),
        ("BertModel", "t5", {"num_buckets": 64, "max_distance": 200}, "num_buckets=32 and max_distance=128"),
        ("BertModel", "rope", {"layers": [0]}, "rope in all layers"),
        ("BertModel", "alibi", {}, "Nearest: t5"),
        ("LlamaForCausalLM", "rope", {"layout": "interleaved"}, "LlamaForCausalLM differs by .*try another layout"),
        ("Qwen3ForCausalLM", "t5", {}, "Nearest: rope in all layers and none"),
        ("Qwen3ForCausalLM", "sinusoidal", {}, "Qwen3ForCausalLM has no learned position embeddings"),
        ("GPTJForCausalLM", "rope", {}, "no rotary parameters that determine all angles"),
        ("ViTModel", "rope", {}, "Nearest: additive encodings and none"),
        ("MarianMTModel", "none", {}, "MarianMTModel computes its positions"),
        ("BertModel", "sinusoidal", {"inject": "every_layer"}, "BertModel adds vectors to its input only"),
        (
            "CLIPModel",
            "sinusoidal",
            {"submodel": "vision_model"},
            "only submodels of this composite model are patched: vision_model",
        ),
        ("MPNetModel", "t5", {"num_buckets": 64, "max_distance": 200}, "num_buckets=32"),
    ],
    ids=str,
)
def test_no_equivalent(name, encoding, options, words):
    with pytest.raises(hf_posenc.UnsupportedModelError, match=words):
        export(name, encoding, **options)


def test_pairs_of_texts():
    classifier = hf_posenc.patch(tiny("BertForSequenceClassification"), "t5")
    with pytest.warns(UserWarning, match="MPNet has no token types") as warned:
        hf_posenc.to_stock(classifier)
    assert {warning.filename for warning in warned} == {__file__}
    model, stock = export("BertForSequenceClassification", "rope")
    equal(model, stock, token_type_ids=torch.arange(19).ge(9).long().expand(2, -1))


def test_every_export_is_verified():
    """A model that computes something else than its weights say isn't exported."""
    model = randomize_encoding(hf_posenc.patch(tiny("BertModel"), "t5")).eval()
    model.posenc.register_forward_hook(lambda module, arguments, output: output * 1.001)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="MPNetModel differs by"):
        hf_posenc.to_stock(model)


def test_lengths():
    model = hf_posenc.patch(tiny("BertModel"), "t5", max_length=40)
    assert hf_posenc.to_stock(model).config.max_position_embeddings == 42
    assert hf_posenc.to_stock(model, max_length=30).config.max_position_embeddings == 32
    for short in (1, 2, 3):
        assert hf_posenc.to_stock(model, max_length=short).config.max_position_embeddings == short + 2
        same_class = hf_posenc.patch(tiny("BertModel"), "sinusoidal", max_length=short)
        assert hf_posenc.to_stock(same_class).config.max_position_embeddings == short
    for wrong in (0, -1, 2.5, True, "9"):
        with pytest.raises(ValueError, match=f"max_length={wrong!r}.*at least 1"):
            hf_posenc.to_stock(model, max_length=wrong)
    with pytest.raises(ValueError, match="max_length=41.*40 tokens"):
        hf_posenc.to_stock(model, max_length=41)
    with pytest.raises(ValueError, match="BertModel isn't patched"):
        hf_posenc.to_stock(tiny("BertModel"))


def test_parameters_are_shared():
    model, stock = export("BertForMaskedLM", "t5")
    assert stock.mpnet.encoder.layer[0].attention.attn.q.weight is model.bert.encoder.layer[0].attention.self.query.weight
    assert stock.mpnet.encoder.relative_attention_bias.weight is model.bert.posenc.weight
    rotated = export("BertForMaskedLM", "rope")[1]
    assert rotated.lm_head.decoder.weight is rotated.roberta.embeddings.word_embeddings.weight  # tied, as before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_types_and_modes(dtype):
    model = randomize_encoding(hf_posenc.patch(tiny("BertModel"), "t5")).to(dtype).train()
    stock = hf_posenc.to_stock(model)
    assert stock.dtype == dtype and stock.training and model.training


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("BertForMaskedLM", "t5"),
        ("BertForSequenceClassification", "rope"),
        ("GPT2LMHeadModel", "sinusoidal"),
        ("LlamaModel", "none"),
    ],
)
def test_loads_without_the_package(name, encoding, tmp_path):
    model, stock = export(name, encoding)
    inputs, expected = equal(model, stock)
    stock.save_pretrained(tmp_path / "model")
    torch.save((inputs, expected), tmp_path / "expected.pt")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert not {"auto_map", "position_encoding", "position_plan"} & {*config}
    assert not [path.name for path in (tmp_path / "model").glob("*.py")]
    kind = f"AutoModel{name[name.index('For') :]}" if "For" in name else "AutoModel"
    kind = "AutoModelForCausalLM" if "LMHead" in name else kind
    run_python(RELOAD, kind, tmp_path / "model", tmp_path / "expected.pt")


@pytest.mark.slow
def test_sentences(minilm, tmp_path):
    """The real MiniLM with shared biases is an MPNet, whose tokenizer returns no token types."""
    model = hf_posenc.patch(SentenceTransformer(minilm), "t5", max_length=700)
    stock = hf_posenc.to_stock(model)
    texts = ["a short text", "Some longer text about dogs and their cats. " * 60]
    expected = model.encode(texts, convert_to_tensor=True)
    assert isinstance(stock[0].model, transformers.MPNetModel)
    assert_close(stock.encode(texts, convert_to_tensor=True), expected, rtol=1e-3)
    assert "token_type_ids" not in stock.tokenizer.model_input_names and "token_type_ids" in model.tokenizer.model_input_names
    stock.save(str(tmp_path))
    assert_close(SentenceTransformer(str(tmp_path)).encode(texts, convert_to_tensor=True), expected, rtol=1e-3)


def test_the_command(minilm, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from hf_posenc.cli import app

    def run(*arguments):
        return CliRunner().invoke(app, [str(each) for each in arguments])

    patched, out = tmp_path / "patched", tmp_path / "out"
    assert run("patch", minilm, "rope", "--output-dir", patched).exit_code == 0
    done = run("export", patched, "--output-dir", out, "--max-length", 300)
    assert done.exit_code == 0, done.output
    assert json.loads((out / "config.json").read_text())["model_type"] == "jina_embeddings_v3"
    assert run("export", out, "--output-dir", tmp_path / "again").exit_code == 1
    assert run("patch", minilm, "alibi", "--output-dir", tmp_path / "alibi").exit_code == 0
    refused = run("export", tmp_path / "alibi", "--output-dir", tmp_path / "no")
    assert refused.exit_code == 1 and "Nearest: t5" in " ".join(refused.output.split()) and not (tmp_path / "no").exists()


@pytest.mark.parametrize("encoding", ["t5", "rope"])
def test_converted_models(tmp_path, encoding):
    """Calibrated vectors become part of biases. `exportable` shares the biases of all layers."""
    # MPNet counts positions of every token but the one with ID 1, whatever its config's pad_token_id.
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    stock("bert", max_position_embeddings=512, pad_token_id=1).save_pretrained(tmp_path)
    BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=512).save_pretrained(tmp_path)
    texts = [" ".join(WORDS[number:]) + " " + " ".join(WORDS * 4) for number in range(12)]
    few: dict = {"texts": texts, "calibration_texts": 3, "calibration_length": 160}
    model = hf_posenc.convert(SentenceTransformer(str(tmp_path)), encoding, **few, max_length=300, exportable=True)
    assert any("posenc.weight" in name and "dense" in name for name, _ in model.named_parameters())
    assert hf_posenc.inspect(model).calibration.ranges == (10 if encoding == "t5" else 1)  # MPNet has a table for them
    exported = hf_posenc.to_stock(model)
    assert_close(exported.encode(texts[:3], convert_to_tensor=True), model.encode(texts[:3], convert_to_tensor=True), rtol=1e-3)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="Nearest: t5.*omit exportable=True"):
        hf_posenc.convert(SentenceTransformer(str(tmp_path)), "relative", texts=texts, exportable=True)
    if encoding == "rope":
        other = hf_posenc.convert(SentenceTransformer(str(tmp_path)), encoding, **few)
        with pytest.raises(hf_posenc.UnsupportedModelError, match="no position embeddings to store .*exportable=True"):
            hf_posenc.to_stock(other)


@pytest.mark.parametrize("encoding", ["t5", "sinusoidal+t5"])
def test_a_converted_mpnet(encoding):
    """Calibrated vectors become part of the table and the biases of the original class."""
    sizes = {"relative_attention_num_buckets": 32, "max_position_embeddings": 162, "pad_token_id": 1}
    batches = [{"input_ids": tokens(6, 160)}]
    model = hf_posenc.convert(tiny("MPNetModel", **sizes), encoding, texts=batches, exportable=True)
    assert model.embeddings.position_embeddings.posenc.weight.ndim == 2
    equal(model, hf_posenc.to_stock(model))


def test_a_converted_rotation():
    model = hf_posenc.convert(tiny("JinaEmbeddingsV3Model"), "rope", texts=[{"input_ids": tokens(6, 24)}], theta=77.0)
    equal(model, hf_posenc.to_stock(model))
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no biases to store"):
        hf_posenc.to_stock(hf_posenc.convert(tiny("LlamaModel"), "rope", texts=[{"input_ids": tokens(6, 24)}], theta=77.0))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_dynamic_scaling_from_another_length(name):
    """Classes of Transformers start dynamic scaling at their maximum length, beyond the lengths that are compared."""
    dynamic = {"type": "rope", "rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 1024}
    model = patched(name, dynamic, max_length=2048)
    with pytest.raises(hf_posenc.UnsupportedModelError) as raised:
        hf_posenc.to_stock(model)
    assert raised.value.reason == "no equivalent stock class"
