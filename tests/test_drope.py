"""experiments/drope.py: its models, passkeys, resumable stages, and the summary of a record."""

import json
import math
import subprocess
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from experiments import drope
from experiments.data import pages
from hf_posenc.evaluation import passkeys, records, stdlib_corpus
from hf_posenc.training import flags, language_modeling, train_clm
from models import LLAMA, randomize

SIZES = dict(LLAMA, vocab_size=300, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
THETA, TRAINED, SHORT = 10_000.0, 1024, 64
PAGE = "Kernels hold 1 lock for each queue, and what waits for it sleeps until the last of them has left. "


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of bytes with a few merges. Each digit is one token, as in SmolLM2."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=299, initial_alphabet=alphabet, special_tokens=["<end>"])
    learned.train_from_iterator([passkeys.TASK + passkeys.FILLER + passkeys.FACT + passkeys.QUESTION, PAGE], trainer)
    learned.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=learned, eos_token="<end>")


@pytest.fixture(scope="module")
def host(tmp_path_factory, tokenizer):
    """The directory of a Llama whose config states training on TRAINED tokens."""
    folder = tmp_path_factory.mktemp("host")
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"max_position_embeddings": TRAINED}, rope_parameters=rope(THETA))
    randomize(LlamaForCausalLM(config), std=0.2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def short(host, tmp_path_factory):
    """The directory of the same Llama with a maximum length of SHORT tokens."""
    model = AutoModelForCausalLM.from_pretrained(host)
    model.config.max_position_embeddings = SHORT
    folder = tmp_path_factory.mktemp("output") / "short"
    model.save_pretrained(folder)
    return folder


def rope(theta, **more):
    return {"rope_type": "default", "rope_theta": theta} | more


def ids(count, seed=0):
    return torch.randint(3, 299, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, given):
    return model.eval()(given).logits


# RoPE.


def test_the_slowest_frequency_turns_as_far():
    """The values are those of SmolLM2: theta 100,000, 64 features, and 8,192 tokens."""
    theta = drope.shortened(100_000, 64, 8192, 256)
    assert 256 * theta ** (-62 / 64) == pytest.approx(8192 * 100_000 ** (-62 / 64))
    assert drope.shortened(THETA, 64, 512, 512) == THETA


@pytest.fixture
def asked(short):
    """Arguments of a run that uses the directory `short` in place of the original."""
    return SimpleNamespace(output_dir=short.parent, trained_length=SHORT, factor=4)


@pytest.mark.parametrize("name", ["short + PI", "short + NTK", "short + YaRN"])
def test_a_rule_is_in_force(short, asked, name):
    model = drope.made(name, asked, 0.0)
    assert type(model) is LlamaForCausalLM and model.config.max_position_embeddings == 4 * SHORT
    rotary, rule = model.model.rotary_emb, drope.RULES[name]
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1 if rule == "yarn" else 1)
    # As Transformers implements them.
    given = {"linear": rope(THETA, rope_type="linear", factor=4.0), "ntk": rope(THETA * 4 ** (16 / 14))}
    given["yarn"] = rope(THETA, rope_type="yarn", factor=4.0, original_max_position_embeddings=SHORT)
    config = AutoConfig.from_pretrained(short, rope_parameters=given[rule], max_position_embeddings=4 * SHORT)
    expected = logits(AutoModelForCausalLM.from_pretrained(short, config=config), ids(200))
    assert_close(logits(model, ids(200)), expected)
    assert_apart(expected, logits(AutoModelForCausalLM.from_pretrained(short), ids(200)))


def test_dynamic_is_ntk_by_the_length_of_the_text(short, asked):
    stock = AutoModelForCausalLM.from_pretrained(short)
    model = drope.made("short + dynamic", asked, 0.0)
    assert_equal(logits(model, ids(SHORT)), logits(stock, ids(SHORT)))
    for times in (2, 3):
        config = AutoConfig.from_pretrained(short, rope_parameters=rope(THETA * (4 * times - 3) ** (16 / 14)))
        expected = logits(AutoModelForCausalLM.from_pretrained(short, config=config), ids(times * SHORT))
        assert_close(logits(model, ids(times * SHORT)), expected)
        assert_apart(expected, logits(stock, ids(times * SHORT)))


def test_queries_are_scaled_behind_the_trained_length(host, tmp_path):
    dropped = hf_posenc.patch(AutoModelForCausalLM.from_pretrained(host), "none")
    dropped = randomize(dropped, std=0.3)  # as if it had been trained since
    dropped.save_pretrained(tmp_path)
    given, slope = ids(3 * SHORT), 0.4
    assert_close(logits(drope.scaled(host, tmp_path, 0.0, SHORT), given), logits(dropped, given))
    model = drope.scaled(host, tmp_path, slope, SHORT)
    assert_close(logits(model, given)[:, :SHORT], logits(dropped, given)[:, :SHORT])
    # In one layer, only the scale of each row's scores changes.
    attention, hidden = dropped.model.layers[0].self_attn, torch.randn(1, 3 * SHORT, 32)
    growth = torch.tensor([1 + slope * max(0.0, math.log(n / SHORT)) for n in range(1, 3 * SHORT + 1)])
    query, key, value = (
        layer(hidden).unflatten(-1, (2, 16)).transpose(1, 2) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    scores = growth[:, None] * (query @ key.mT) / 4
    weights = scores.masked_fill(torch.ones(3 * SHORT, 3 * SHORT).triu(1).bool(), -math.inf).softmax(-1)
    expected = attention.o_proj((weights @ value).transpose(1, 2).flatten(2))
    found = []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *given: found.append(given[-1][0]))
    model.model.layers[0].input_layernorm = torch.nn.Identity()
    with torch.no_grad():
        model(inputs_embeds=hidden)
    handle.remove()
    assert_close(found[0], expected)


# Passkeys.


@pytest.mark.parametrize("part", [0, 0.3, 1])
def test_a_passkey_lies_where_it_is_asked_for(tokenizer, part):
    least = passkeys.least_length(tokenizer)
    for each in passkeys.passkeys(tokenizer, least + 99, part, 3, seed=0):
        assert len(each.prompt) + len(each.answer) == least + 99
        assert tokenizer.decode(each.answer) == each.key and len(each.key) == passkeys.DIGITS == len(each.answer)
        text = tokenizer.decode(each.prompt)
        assert text.count(each.key) == 2 and text.startswith(passkeys.TASK) and text.endswith(f"{passkeys.QUESTION} ")
        assert tokenizer.decode(each.prompt[each.depth :]).startswith(passkeys.FACT.format(key=each.key))
        before = each.depth - len(tokenizer(passkeys.TASK)["input_ids"])
        assert before == round(part * 100)
        # The prompt and answer are the tokenizer's output for the text.
        assert tuple(tokenizer(text + each.key)["input_ids"]) == each.prompt + each.answer


def test_passkeys_differ_and_come_out_the_same(tokenizer):
    length = passkeys.least_length(tokenizer) + 20
    first, again = (passkeys.passkeys(tokenizer, length, 0.5, 8, seed=1) for _ in range(2))
    assert first == again and len({each.key for each in first}) == 8
    assert {each.key for each in first}.isdisjoint(each.key for each in passkeys.passkeys(tokenizer, length, 0.5, 8, seed=2))


def test_no_room_for_filler(tokenizer):
    least = passkeys.least_length(tokenizer)
    with pytest.raises(ValueError, match=f"length={least - 1} .* take {least - 1} tokens"):
        passkeys.passkey(tokenizer, least - 1, 0.5, "12345")
    with pytest.raises(ValueError, match=r"part=1\.5"):
        passkeys.passkeys(tokenizer, least, 1.5, 1, 0)


class Answering(torch.nn.Module):
    """Predicts the following tokens, except the digit at `wrong` of each answer."""

    device = torch.device("cpu")

    def __init__(self, prompts, wrong):
        super().__init__()
        self.rows, self.wrong = [[*each.prompt, *each.answer] for each in prompts], wrong

    def forward(self, input_ids, logits_to_keep):
        known = {tuple(row[:-1]): row for row in self.rows}
        following = torch.tensor([known[tuple(row)][-logits_to_keep:] for row in input_ids.tolist()])
        following[:, self.wrong] += 1
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, 400).float())


def test_which_digits_are_right(tokenizer):
    prompts = passkeys.passkeys(tokenizer, 900, 0.5, 5, seed=0)  # several batches
    found = passkeys.right(Answering(prompts, wrong=3), prompts)
    assert_equal(found, torch.tensor([[True, True, True, False, True]] * 5))


# Stages.


@pytest.fixture
def texts(monkeypatch):
    """Evaluation pages of sufficient length, and texts for training."""
    found = [pages.Page(f"{i}", f"page {i}", f"Page {i}. " + PAGE * 60) for i in range(12)]
    monkeypatch.setattr(pages, "split", lambda folder: (found, [f"Text {i}. " + PAGE * 5 for i in range(40)]))
    monkeypatch.setattr(stdlib_corpus, "split", lambda: ([], [f"Passage {i}. {PAGE}" for i in range(40)]))


def line(host, output, *more):
    given = ["--pages", "pages", "--model_name_or_path", host, "--trained_length", 256, "--factor", 2, "--tokens", 5120]
    given += ["--documents", 2, "--keys", 2, "--mixed_precision", "no", "--output_dir", output, *more]
    return [str(each) for each in given]


def trained(start, output, arguments, *more):
    """A replacement of recalibrate that makes the model as if it had been trained."""
    if (output / "all_results.json").exists():
        return
    model = AutoModelForCausalLM.from_pretrained(start)
    if more:
        model = hf_posenc.patch(model, more[-1])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(output)
    losses = [3.0 - 0.1 * i for i in range(5)]
    records.write(output / "all_results.json", {"steps": 5, "seconds": 1.0, "tokens_per_second": 9, "losses": losses})


@pytest.fixture
def trained_at_once(texts, monkeypatch):
    monkeypatch.setattr(drope, "recalibrate", trained)
    monkeypatch.setattr(drope, "SLOPES", (0.0, 0.2))


@pytest.mark.slow
def test_a_run_and_the_same_again(host, trained_at_once, tmp_path, monkeypatch):
    done = tmp_path / "done"
    drope.main(line(host, done))
    record = records.read(done / "drope.json")
    assert list(record["methods"]) == list(drope.METHODS) and record["lengths"] == [128, 256, 512]
    assert record["theta"]["short"] == pytest.approx(drope.shortened(THETA, 16, TRAINED, 256))
    assert record["training"]["DroPE"]["tokens"] == 5 * 4 * 256
    short = AutoConfig.from_pretrained(done / "short")
    assert short.max_position_embeddings == 256 and "position_encoding" not in short.to_dict()
    assert AutoConfig.from_pretrained(done / "drope").position_encoding["type"] == "none"
    dynamic, stand_in = (record["methods"][name]["losses"] for name in ("short + dynamic", "short"))
    assert dynamic["256"] == stand_in["256"] and dynamic["512"] != stand_in["512"]
    texts = records.read(done / "texts.json")
    assert len(texts["documents"]) == 2 and {len(each) for each in texts["documents"] + texts["held_out"]} == {512}
    assert (done / "drope.png").stat().st_size > 20_000 and "does not agree" in (done / "drope.txt").read_text()

    def again(*_):
        raise AssertionError("done twice")

    for name in ("perplexity.losses", "passkeys.right", "write_texts", "load_original"):
        monkeypatch.setattr(f"experiments.drope.{name}", again)
    drope.main(line(host, done))
    assert records.read(done / "drope.json") == record
    drope.main(line(host, done, "--methods", "short"))  # the other methods stay in the report
    assert records.read(done / "drope.json") == record
    drope.evaluation_file(done, "DroPE").unlink()
    with pytest.raises(AssertionError, match="done twice"):
        drope.main(line(host, done))


def test_a_run_of_some_methods(host, trained_at_once, tmp_path):
    some = ["short", "DroPE", drope.SCALED]
    drope.main(line(host, tmp_path, "--methods", *some))
    assert list(records.read(tmp_path / "drope.json")["methods"]) == some
    for flag, value, before in (("learning_rate", 0.1, 0.0005), ("trained_length", 300, 256)):
        with pytest.raises(SystemExit, match=f"begun with {flag} {before}, and this run has {value}: give the same"):
            drope.main(line(host, tmp_path, f"--{flag}", value))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--factor", 1], "--factor 1: allowed are numbers from 2 on"),
        (["--tokens", 100], "--tokens 100 is less than a step"),
        (["--passkey_share", 1], "--passkey_share 1.0: allowed are shares"),
        (["--trained_length", 12], "--trained_length 12: allowed are numbers from 16 on"),
        (["--methods", "rope"], "invalid choice: 'rope'"),
    ],
)
def test_wrong_flags(host, tmp_path, capsys, more, expected):
    with pytest.raises(SystemExit):
        drope.main(line(host, tmp_path, *more))
    assert expected in capsys.readouterr().err


def test_no_room_for_a_passkey(host, tmp_path, tokenizer):
    with pytest.raises(SystemExit, match=f"--trained_length 64: .* allowed is {2 * passkeys.least_length(tokenizer)} or more"):
        drope.main(line(host, tmp_path, "--trained_length", 64))


def test_what_is_trained_on(host, texts, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(passkeys, "DIGITS", 2)  # so few keys that some are drawn twice
    arguments = drope.parse_arguments(line(host, tmp_path, "--passkey_share", 0.4))
    drope.write_texts(arguments, tokenizer, tmp_path)
    written = [json.loads(row)["text"] for row in (tmp_path / "train.jsonl").read_text().splitlines()]
    sizes = {text: len(tokenizer(text)["input_ids"]) for text in written}
    of_passkeys = [text for text in written if text.startswith(passkeys.TASK)]
    assert sum(sizes.values()) > 5120 and max(sizes[text] for text in of_passkeys) <= 256 + 1
    assert 0.35 < sum(sizes[text] for text in of_passkeys) / sum(sizes.values()) < 0.5
    assert all(text.startswith(("Text", "Passage", passkeys.TASK)) for text in written)
    asked = {
        each.key for length in (128, 256, 512) for each in passkeys.at_depths(tokenizer, length, arguments.keys, arguments.seed)
    }
    assert not any(text.split("pass key is ")[-1].strip(".") in asked for text in of_passkeys)


def test_texts_that_are_too_few(host, texts, tokenizer, tmp_path):
    for more, expected in (
        (["--documents", 20], "12 evaluation pages .* --documents 20"),
        (["--tokens", 10**6], "lower --tokens"),
    ):
        with pytest.raises(SystemExit, match=expected):
            drope.write_texts(drope.parse_arguments(line(host, tmp_path, *more)), tokenizer, tmp_path)


def test_what_train_clm_is_asked_for(host, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command: asked.append(command) or SimpleNamespace(returncode=0))
    arguments = drope.parse_arguments(line(host, tmp_path, "--learning_rate", 0.003))
    drope.recalibrate(host, tmp_path / "out", arguments, "--position_encoding", "none")
    (_, flag, module, *given) = asked[0]
    assert (flag, module) == ("-m", train_clm.__name__)
    parsed = flags.parse(language_modeling.parser(None), given)
    assert (parsed.packing, parsed.text_length, parsed.max_train_steps, parsed.learning_rate) == (True, 256, 5, 0.003)
    assert parsed.position_encoding == {"type": "none"} or parsed.position_encoding == "none"
    monkeypatch.setattr(subprocess, "run", lambda command: SimpleNamespace(returncode=3))
    with pytest.raises(SystemExit, match="3"):
        drope.recalibrate(host, tmp_path / "out", arguments)


# The summary of a record.


def made_up(drope_at_longest, found_at_longest):
    """A record of two pages, two lengths up to T = 8 and one beyond, and two passkeys at each of two depths."""

    def method(*losses, found=1):
        keys = {"4": [[1, 1]] * 4, "8": [[1, 1]] * 4, "16": [[1, found]] * 2 + [[0, 1]] * 2}
        return {"losses": {str(4 * 2**i): [loss, loss + 0.2] for i, loss in enumerate(losses)}, "passkeys": keys}

    methods = {name: method(2.1, 2.0, 2.0) for name in ("original", "dropped")} | {"short": method(2.1, 2.0, 3.0)}
    methods |= {name: method(2.1, 2.0, 2.5, found=0) for name in drope.RULES}
    methods["DroPE"] = method(2.12, 2.02, drope_at_longest, found=found_at_longest)
    training = {"steps": 4, "seconds": 9.0, "tokens_per_second": 4, "losses": [4.0, 3.0, 2.5, 2.0], "tokens": 64}
    record = {"settings": {"trained_length": 8, "documents": 2, "keys": 2}, "lengths": [4, 8, 16], "parts": [0, 1]}
    record |= {"theta": {"original": 9.0, "short": 3.0}, "slopes": None}
    return record | {"training": {"DroPE": training, "short": training}, "methods": methods}


def test_summary():
    found = drope.summary(made_up(2.0, 1))
    assert found["DroPE"]["16"]["perplexity"] == pytest.approx(math.exp(2.1))
    half = 12.706 * 0.1  # Student's t for two pages
    assert found["DroPE"]["16"]["interval"] == pytest.approx([math.exp(2.1 - half), math.exp(2.1 + half)], rel=1e-3)
    # Beyond T, the ratio is to `short` at T. Up to T, it is to `short` at the same length.
    assert found["DroPE"]["16"]["ratio"] == pytest.approx(1.0) and found["short"]["16"]["ratio"] == pytest.approx(math.e)
    assert found["DroPE"]["4"]["ratio"] == pytest.approx(math.exp(0.02)) and found["short"]["4"]["ratio"] == 1
    assert (found["DroPE"]["16"]["found"], found["DroPE"]["16"]["digits"]) == (0.5, 0.75)
    assert (found["short + PI"]["16"]["found"], found["short + PI"]["16"]["digits"]) == (0, 0.5)


@pytest.mark.parametrize(("loss", "found", "expected"), [(2.0, 1, "aaaaxa"), (2.3, 1, "axaaxa"), (2.0, 0, "aaaaxx")])
def test_verdicts(loss, found, expected):
    said = drope.verdicts(made_up(loss, found))
    assert "".join("a" if each.startswith("agrees") else "x" for each in said) == expected
    assert said[1].endswith(f"×{math.exp(loss - 2.02):.2f}") and "short + YaRN 0.00" in said[5]


def test_the_figure(tmp_path, monkeypatch):
    import matplotlib.pyplot

    kept = []
    monkeypatch.setattr(matplotlib.pyplot, "close", kept.append)
    drope.draw(made_up(2.0, 1), tmp_path / "drope.png")
    axes = {axis.get_title(): axis for axis in kept[0].axes}
    assert {"DroPE", "short", "short + PI"} <= {*axes}
    (line,) = [line for line in axes["perplexity of the same tokens"].lines if line.get_label() == "DroPE"]
    assert list(line.get_xdata()) == [4, 8, 16] and line.get_ydata()[-1] == pytest.approx(math.exp(2.1))
    assert axes["DroPE"].images[0].get_array().tolist() == [[1, 1, 1], [1, 1, 0.5]]
