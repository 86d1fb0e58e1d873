"""`from_v4`: checkpoints of Transformers 4.57 (tests/v4_checkpoints.py) give the same outputs and gradients."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from conftest import ROOT, run_python
from hf_posenc.cli import app
from hub_server import TOKEN, Commit, Repo, serve
from models import CACHE, backends, stock
from v4_checkpoints import cotangent
from v4_checkpoints import run as output_of

DATA = ROOT / "tests" / "v4"


FAMILIES = sorted(path.name for path in DATA.iterdir())


KINDS = ("relative_key", "relative_key_query")


UNSERVED = ("esm", "relative_key_query")


CASES = [(family, kind) for family in FAMILIES for kind in KINDS if (family, kind) != UNSERVED]


TABLE = "distance_embedding.weight"


@pytest.fixture
def saved(tmp_path):
    """(family, kind) -> a copy of the directory that v4 saved."""

    def copied(family, kind="relative_key", **changes):
        folder = tmp_path / f"{family}-{kind}"
        shutil.copytree(DATA / family, folder, ignore=shutil.ignore_patterns("expected*"))
        change(folder, position_embedding_type=kind, **changes)
        return folder

    return copied


def change(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def model_class(folder):
    return getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])


def expected(family, kind):
    """Inputs, output, and name -> gradient in v4."""
    file = DATA / family / "expected.safetensors"
    tensors, weights = load_file(file), load_file(DATA / family / "model.safetensors")
    with safe_open(file, framework="pt") as opened:
        names = json.loads(opened.metadata()["gradients"])
    parts = tensors[f"{kind}.gradients"].split([weights[name].numel() for name in names])
    gradients = {name: part.view(weights[name].shape) for name, part in zip(names, parts, strict=True)}
    inputs = {name.removeprefix("inputs."): each for name, each in tensors.items() if name.startswith("inputs.")}
    return inputs, tensors[f"{kind}.output"], gradients


def near(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def save(weights, folder):
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refused(words, folder, *arguments, error=ValueError, **more):
    with pytest.raises(error, match=words):
        hf_posenc.from_v4(folder, *arguments, **more)


def gradients_of(model, names):
    """The gradients with v4's names and rows. v4 counts distances from key to query, and doesn't scale ALBERT's vectors."""
    parameters, found = dict(model.named_parameters(remove_duplicate=False)), {}
    for name in names:
        if name.endswith(TABLE):
            path = name.removesuffix(TABLE)
            parameter = parameters.get(f"{path}posenc.weight", parameters.get(f"{path}posenc.shaw.weight"))
            longer = parameter.shape[-1] ** 0.5 if isinstance(model, transformers.AlbertPreTrainedModel) else 1
            found[name] = parameter.grad.flip(0) * longer
        elif name not in parameters:
            found[name] = parameters[name.replace("embeddings.position_embeddings", "posenc.learned")].grad
        else:
            found[name] = parameters[name].grad
    return found


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_outputs_and_gradients_are_those_of_v4(saved, family, kind):
    folder = saved(family, kind)
    model = hf_posenc.from_v4(folder, model_class(folder))
    assert type(model).__name__ == f"PosEnc{model_class(folder).__name__}" and not model.training
    inputs, output, gradients = expected(family, kind)
    for implementation in backends(model):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        actual = output_of(model, inputs)
        near(actual, output, atol=2e-5)  # ERNIE's outputs differ by 5e-6 to 1.02e-5, depending on the CPU
        (actual * cotangent(actual)).sum().backward()
        assert_close(gradients_of(model, gradients), gradients, rtol=1e-5)
    assert sum(name.endswith(TABLE) for name in gradients) == 1 + (family not in ("albert", "bros"))


def test_the_absolute_table_counts_where_v4_added_it_alone(saved):
    """BERT's absolute table, which v4 didn't use, isn't in the model. That of bert-generation is."""
    names = {name for name, _ in hf_posenc.from_v4(saved("bert")).named_parameters()}
    assert not any("position_embeddings" in name or "learned" in name for name in names)
    model = hf_posenc.from_v4(saved("bert-generation"))
    assert model.config.position_encoding["type"] == "learned+shaw"
    weights = load_file(DATA / "bert-generation" / "model.safetensors")
    assert_equal(model.posenc.learned.weight, weights["bert.embeddings.position_embeddings.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_with_a_cache(saved, kind):
    """The outputs equal those of v4, which decoded one token at a time. (4.57 is wrong if several tokens enter with a cache.
    hf-posenc is right in this case also.)
    """
    model = hf_posenc.from_v4(saved("bert-decoder", kind), transformers.BertLMHeadModel)
    inputs, output, _ = expected("bert-decoder", kind)
    states, ids = inputs["encoder_hidden_states"][:1], inputs["input_ids"][:1]
    near(model(ids, encoder_hidden_states=states, use_cache=True).logits, output[:1])
    steps = load_file(DATA / "bert-decoder" / "expected.safetensors")[f"{kind}.steps"]
    for sizes in ([1] * 10, [4, 1, 5]):
        past, parts = None, []
        for part in ids.split(sizes, dim=1):
            found = model(part, encoder_hidden_states=states, **{CACHE: past}, use_cache=True)
            past = found.past_key_values
            parts.append(found.logits)
        near(torch.cat(parts, dim=1), steps)


# Other forms of classes and checkpoints.


def test_auto_classes(saved):
    folder = saved("bert")
    inputs, output, _ = expected("bert", "relative_key")
    for auto in (transformers.AutoModelForMaskedLM, transformers.BertForMaskedLM, hf_posenc.PosEncBertForMaskedLM):
        model = hf_posenc.from_v4(folder, auto)
        assert type(model) is hf_posenc.PosEncBertForMaskedLM
        near(output_of(model, inputs), output)
    base = hf_posenc.from_v4(str(folder))
    assert type(base) is hf_posenc.PosEncBertModel
    assert_close(base(**inputs)[0], model.bert(**inputs)[0])
    # A head is loaded from a checkpoint of the bare model, whose names have no prefix.
    weights = load_file(folder / "model.safetensors")
    save({name.removeprefix("bert."): each for name, each in weights.items() if name.startswith("bert.")}, folder)
    headed = hf_posenc.from_v4(folder, transformers.AutoModelForSequenceClassification).eval()
    assert_close(headed.bert(**inputs)[0], base(**inputs)[0])


def test_shards_and_arguments_of_loading(saved):
    folder = saved("bert")
    weights = load_file(folder / "model.safetensors")
    names, index = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    inputs, output, _ = expected("bert", "relative_key")
    more = dict(subfolder=folder.name, attn_implementation="eager", device_map="cpu", local_files_only=True)
    model = hf_posenc.from_v4(folder.parent, transformers.AutoModelForMaskedLM, **more)
    assert model.config._attn_implementation == "eager"
    near(output_of(model, inputs), output)
    half = hf_posenc.from_v4(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_the_length_is_what_v4_took(saved):
    """For RoBERTa, the maximum length is one less than in this config, and two less in the models on the Hub."""
    model = hf_posenc.from_v4(saved("roberta"))
    ids = torch.randint(4, 12, (1, 30), generator=torch.Generator().manual_seed(0))
    assert hf_posenc.inspect(model).max_length == 10
    with pytest.raises(ValueError, match="11"):
        model(ids[:, :11])
    assert hf_posenc.inspect(hf_posenc.from_v4(DATA / "roberta", max_length=30)).max_length == 30
    longer = hf_posenc.extend(model, 30)
    assert_equal(longer(ids)[0], hf_posenc.from_v4(DATA / "roberta", max_length=30)(ids)[0])
    assert_close(longer(ids[:, :10])[0], model(ids[:, :10])[0])


FROM_THE_HUB = """
import sys, torch, hf_posenc
from transformers import AutoModelForMaskedLM
from safetensors.torch import load_file
given = load_file(sys.argv[1])
model = hf_posenc.from_v4("me/old", AutoModelForMaskedLM, revision="v4")
rows = given["inputs.input_ids"][:1]
print(float((model(rows)[0] - given["relative_key.output"][:1]).abs().max()) < 1e-5)
print(hf_posenc.inspect("me/pickled").ignored)
try:
    hf_posenc.from_v4("me/pickled")
except ValueError as error:
    print(error)
"""


def test_from_the_hub(tmp_path):
    files = {file.name: file.read_bytes() for file in (DATA / "bert").iterdir()}
    pickled = {"config.json": files["config.json"], "pytorch_model.bin": b"\x80\x04."}
    with serve() as hub:
        hub.repos |= {"me/old": Repo(), "me/pickled": Repo()}
        hub.repos["me/old"].branches["v4"] = [Commit("old", files)]
        hub.repos["me/pickled"].commits.append(Commit("older", pickled))
        settings = dict(HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN, HF_HOME=str(tmp_path), HF_HUB_DISABLE_XET="1")
        file = DATA / "bert" / "expected.safetensors"
        said = run_python(FROM_THE_HUB, file, fresh=True, **{**settings, "HF_HUB_OFFLINE": "0"}).splitlines()
    assert said[0] == "True" and "relative_key" in said[1] and "me/pickled has no model.safetensors" in said[2]


# Use of the loaded model.


@pytest.mark.parametrize(("family", "kind"), [("bert", "relative_key_query"), ("bert-generation", "relative_key")])
def test_trained_saved_and_loaded(saved, tmp_path, family, kind):
    folder = saved(family, kind)
    model = hf_posenc.from_v4(folder, model_class(folder)).train()
    inputs, _, _ = expected(family, kind)
    tables = {name: each.clone() for name, each in model.named_parameters() if "posenc" in name}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        torch.manual_seed(0)
        losses.append(torch.nn.functional.cross_entropy(output_of(model, inputs).flatten(0, 1), inputs["input_ids"].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[2] < losses[0] and tables
    for name, before in tables.items():
        assert_apart(model.get_parameter(name), before, by=1e-6)
    model.eval().save_pretrained(tmp_path / "new")
    names = load_file(tmp_path / "new" / "model.safetensors").keys()
    assert not any("distance_embedding" in name for name in names) and set(tables) <= set(names)
    causal = "generation" in family
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    again = auto.from_pretrained(tmp_path / "new")
    assert torch.equal(output_of(again, inputs), output_of(model, inputs)) and hf_posenc.inspect(again).ignored == ()


def test_unpatch_has_nothing_to_bring_back(saved):
    folder = saved("bert")
    with pytest.raises(ValueError, match="from scratch or by from_v4"):
        hf_posenc.unpatch(hf_posenc.from_v4(folder))
    for change in (hf_posenc.patch, hf_posenc.convert):
        more = {} if change is hf_posenc.patch else {"texts": []}
        with pytest.raises(ValueError, match="no original positions"):
            change(hf_posenc.from_v4(folder), "alibi", **more)


@pytest.mark.parametrize("family", ["bert", "bert-generation"])
def test_a_method_isnt_sent_to_unpatch(saved, family):
    """The error doesn't recommend `unpatch`, because there is no original model."""
    with pytest.raises(ValueError, match="method='yarn'") as raised:
        hf_posenc.extend(hf_posenc.from_v4(saved(family)), 30, "yarn")
    assert "unpatch" not in str(raised.value)
    for encoding in ("shaw", "learned"):
        with pytest.raises(ValueError, match=r"hf_posenc\.unpatch"):
            hf_posenc.extend(hf_posenc.patch(stock("bert"), encoding), 30, "yarn")


def test_inspect_says_that_it_is_ignored_until_it_is_not(saved, tmp_path):
    for family in ("bert", "esm", "roberta"):
        folder = saved(family)
        (note,) = hf_posenc.inspect(folder).ignored
        assert "'relative_key'" in note and "from_v4" in note and "wrong" in note
        assert hf_posenc.inspect(model_class(folder).from_pretrained(folder)).ignored == (note,)
        model = hf_posenc.from_v4(folder)
        assert hf_posenc.inspect(model).ignored == ()
        model.save_pretrained(tmp_path / "new" / family)
        assert hf_posenc.inspect(tmp_path / "new" / family).ignored == ()
    esm = json.loads((tmp_path / "new" / "esm" / "config.json").read_text())
    assert esm["position_embedding_type"] == "absolute"
    alibi = hf_posenc.patch(transformers.AutoModel.from_pretrained(DATA / "bert"), "alibi")
    (note,) = hf_posenc.inspect(alibi).ignored
    assert "from_v4" in note and "wrong" not in note


def test_parts_of_a_model(saved):
    """This also holds for the submodels of an encoder-decoder model, whose own config doesn't mention the encoding."""
    encoder, decoder = (transformers.BertConfig.from_pretrained(saved(name)) for name in ("bert", "bert-decoder"))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.EncoderDecoderModel(config)
    assert "from_v4" in hf_posenc.inspect(model.encoder).ignored[0]
    with pytest.raises(ValueError, match=r"hf_posenc\.from_v4"):
        hf_posenc.patch(model, "relative_key", submodel="encoder")


# Errors.


@pytest.mark.parametrize("encoding", ["relative_key", "relative_key_query", "shaw", "sinusoidal+shaw"])
def test_vectors_that_are_lost_are_not_replaced_by_random_ones(saved, encoding):
    folder = saved("bert")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"hf_posenc\.from_v4"):
        hf_posenc.patch(model, encoding)
    with pytest.raises(ValueError, match=r"hf_posenc\.from_v4"):
        hf_posenc.PosEncBertForMaskedLM.from_pretrained(folder, position_encoding=encoding)
    hf_posenc.patch(model, "alibi")
    del model.config.position_embedding_type
    hf_posenc.patch(model, encoding)


def test_models_without_their_vectors(saved):
    """An ESM without its vectors has no positions, and such a model can't be an original model."""
    for kind in KINDS:
        model = transformers.AutoModel.from_pretrained(saved("esm", kind))
        for encoding in (kind, "alibi"):
            with pytest.raises(ValueError, match=rf"'{kind}'.* no positions to replace.*hf_posenc\.from_v4"):
                hf_posenc.patch(model, encoding)
    model = transformers.AutoModel.from_pretrained(saved("bert"))
    with pytest.raises(ValueError, match="can't be calibrated"):
        hf_posenc.convert(model, "t5", texts=[{"input_ids": torch.full((30, 8), 5)}])
    with pytest.raises(ValueError, match=r"hf_posenc\.from_v4"):
        hf_posenc.extend(model, 64, "linear")


def test_what_is_no_such_checkpoint(saved, tmp_path):
    folder = saved("bert", "absolute")
    refused("position_embedding_type='absolute'.*from_v4.*relative_key", folder)
    change(folder, position_embedding_type=["relative_key"])
    refused("position_embedding_type=", folder)
    stock("bert").save_pretrained(tmp_path / "stock")
    refused("position_embedding_type='absolute'", tmp_path / "stock")
    hf_posenc.from_v4(DATA / "bert").save_pretrained(tmp_path / "new")
    refused(r"AutoModel\.from_pretrained", tmp_path / "new")
    (tmp_path / "empty").mkdir()
    refused(r"has no config\.json.*subfolder", tmp_path / "empty")
    refused("Hub ID, not a BertModel", stock("bert"))


def test_tables_that_are_missing_or_of_other_sizes(saved):
    folder = saved("bert")
    weights = load_file(folder / "model.safetensors")
    name = f"bert.encoder.layer.1.attention.self.{TABLE}"
    table = weights.pop(name)
    elsewhere = {other: table.clone() for other in (name.replace("attention", "crossattention"), name.replace("r.1", "r.7"))}
    for more, words in (
        ({}, rf"has no {name}.*the checkpoint that v4 saved"),
        *(
            ({name: part.contiguous()}, rf"{name} has shape \({len(part)}, {part.shape[1]}\), .*\(19, 4\)")
            for part in (table[:-2], table[:, :2], table[:-1])
        ),
        *(({name: table, other: each}, rf"{other}.*no self-attention of that name") for other, each in elsewhere.items()),
    ):
        save({**weights, **more}, folder)
        refused(words, folder, transformers.BertForMaskedLM)


def test_pickles(saved):
    folder = saved("bert")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(r"Transformers", folder)
    index = {"metadata": {}, "weight_map": {"bert.embeddings.word_embeddings.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("not a safetensors file and was not opened", folder)


def test_families_and_classes(saved):
    unsupported = {"error": hf_posenc.UnsupportedModelError}
    refused("relative_key_query follows", saved(*UNSERVED), **unsupported)
    refused(r"lilt.*v4\.md", saved("roberta", "relative_key", model_type="lilt"), **unsupported)
    folder = saved("roberta", "relative_key_query", model_type="wav2vec2-bert")
    refused(r"wav2vec2\-bert.*from_pretrained", folder)
    folder = saved("electra", "absolute", text_config={"position_embedding_type": "relative_key"})
    refused("position_embedding_type='relative_key' in its text_config", folder, **unsupported)
    folder = saved("bert")
    refused("RobertaModel.*bert", folder, transformers.RobertaModel)
    auto = transformers.AutoModelForSpeechSeq2Seq
    refused("AutoModelForSpeechSeq2Seq has no class for 'bert'", folder, auto)
    refused("auto_class='AutoModel'", folder, "AutoModel")
    refused("max_length=0", folder, max_length=0)
    refused("max_length=20 .* 10 positions", saved("bert-generation"), max_length=20)


# The command.


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("kind", KINDS)
def test_the_command(saved, tmp_path, kind):
    folder = saved("bert", kind)
    assert "ignored" in run("inspect", folder)
    shown = run("patch", folder, kind, "--output-dir", tmp_path / "new")
    assert "relative vectors" in shown and "ignored" not in shown and "ignored" not in run("inspect", tmp_path / "new")
    inputs, output, _ = expected("bert", kind)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(output_of(model, inputs), output, rtol=0, atol=1e-5)
    other = next(each for each in KINDS if each != kind)
    for arguments in ([other], [kind, "--option", "max_distance=3"], [kind, "--layers", "0"], ["sinusoidal+shaw"]):
        shown = run("patch", folder, *arguments, "--output-dir", tmp_path / "none", code=1)
        assert "Error" in shown and not (tmp_path / "none").exists()
    run("patch", folder, "alibi", "--output-dir", tmp_path / "alibi")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_the_command_on_sentence_transformers(minilm, tmp_path, inner):
    """A sentence-transformers directory contains such a model, at its root or at the location of older versions."""
    root, folder = tmp_path / "sentences", tmp_path / "sentences" / inner
    shutil.copytree(minilm, root)
    if inner:
        folder.mkdir()
        for file in [file for file in root.iterdir() if file.is_file() and "sentence_transformers" not in file.name]:
            if file.name != "modules.json":
                file.rename(folder / file.name)
        modules = json.loads((root / "modules.json").read_text())
        (root / "modules.json").write_text(json.dumps([{**modules[0], "path": inner}, *modules[1:]]))
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    rows, head_dim = 2 * config["max_position_embeddings"] - 1, config["hidden_size"] // config["num_attention_heads"]
    generator = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        weights[f"encoder.layer.{layer}.attention.self.{TABLE}"] = torch.randn(rows, head_dim, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, position_embedding_type="relative_key")
    from sentence_transformers import SentenceTransformer

    run("patch", root, "relative_key", "--output-dir", tmp_path / "new")
    model = SentenceTransformer(str(tmp_path / "new"), device="cpu")
    assert type(model[0].model) is hf_posenc.PosEncBertModel and model.max_seq_length == config["max_position_embeddings"]
    own = hf_posenc.from_v4(folder)
    text = model.tokenize(["a short one"])
    assert_close(model[0].model(**text)[0], own(**text)[0])
