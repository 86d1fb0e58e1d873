"""`hf-posenc eval` and `hf-posenc bench`: their measurements and errors."""

import copy
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import diagnostics
from hf_posenc.cli import app
from hf_posenc.evaluation import classification, metrics, model_comparison, passkeys, throughput
from hf_posenc.evaluation.retrieval import Embedder, RetrievalStrategy, chunk, cut
from models import stock

WORDS = ["river", "stone", "window", "garden", "letter", "bridge", "candle", "forest", "mirror", "harbor", "meadow", "lantern"]
CLASSES = ["water", "earth", "7"]
T2 = 4.302652729911275
"""The 97.5% quantile of Student's t with 2 degrees of freedom."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models with a tokenizer of WORDS, with 24 tokens or without a length limit. Texts of 60 words, and questions."""
    path = tmp_path_factory.mktemp("models")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]))
    masked = stock("bert", "ForMaskedLM")
    classes = stock("bert", "ForSequenceClassification", seed=5, num_labels=3)
    classes.config.label2id = {name: i for i, name in enumerate(CLASSES)}
    classes.config.id2label = dict(enumerate(CLASSES))
    models = {
        "short": masked,
        "endless": hf_posenc.patch(masked, "alibi"),
        "endless-t5": hf_posenc.patch(masked, "t5"),
        "embeds": stock("bert"),
        "embeds-endless": hf_posenc.patch(stock("bert"), "alibi"),
        "embeds-windows": hf_posenc.extend(stock("bert"), 62, "windows"),
        "classes": classes,
        "classes-endless": hf_posenc.patch(classes, "alibi"),
        "scores": stock("bert", "ForSequenceClassification", num_labels=1),
    }
    for name, model in models.items():
        model.save_pretrained(path / name)
        BertTokenizer(str(path / "vocab.txt"), model_max_length=24).save_pretrained(path / name)
    generator = torch.Generator().manual_seed(0)
    drawn = [[WORDS[i] for i in torch.randint(len(WORDS), (60,), generator=generator)] for _ in range(24)]
    texts = [" ".join(row) for row in drawn]
    (path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    questions = [{"query": " ".join(row[:6]), "document": text} for row, text in zip(drawn, texts, strict=True)]
    (path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    labels = [("water", "water"), ("earth", "earth"), ("7", 7)]  # names of classes, of which one is a number
    rows = [{"text": " ".join(row[: 5 + 2 * i]), "label": labels[i % 3][i % 2]} for i, row in enumerate(drawn)]
    (path / "labeled.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "odd.jsonl").write_text("\n".join(json.dumps({**row, "kind": "fire", "none": None}) for row in rows))
    return path


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """Tiny decoders of 100 tokens, or of any number, that mostly predict digits; texts of 60, 150, and 240 words."""
    path, tokenizers = tmp_path_factory.mktemp("causal"), {}
    told = passkeys.TASK + passkeys.FILLER + passkeys.FACT + passkeys.QUESTION
    for size in (400, 300):
        learned, alphabet = Tokenizer(BPE()), pre_tokenizers.ByteLevel.alphabet()
        learned.decoder = decoders.ByteLevel()
        learned.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
        how = {"initial_alphabet": alphabet, "special_tokens": ["<end>"], "show_progress": False}
        learned.train_from_iterator([" " + " ".join(WORDS), told], trainers.BpeTrainer(vocab_size=size, **how))
        tokenizers[size] = PreTrainedTokenizerFast(tokenizer_object=learned, eos_token="<end>")
    model = stock("llama", "ForCausalLM", vocab_size=400, max_position_embeddings=100, pad_token_id=None)
    digits = tokenizers[400].convert_tokens_to_ids([*"123456789"])
    with torch.no_grad():
        model.lm_head.weight[[i for i in range(400) if i not in digits]] *= 0.1
    models = {"short": model, "endless": hf_posenc.patch(model, "alibi"), "foreign": model}
    for name, each in models.items():
        each.save_pretrained(path / name)
        tokenizers[300 if name == "foreign" else 400].save_pretrained(path / name)
    generator = torch.Generator().manual_seed(0)
    drawn = [[WORDS[i] for i in torch.randint(len(WORDS), (60 + 90 * n,), generator=generator)] for n in range(3)]
    texts = ["".join(f" {word}" for word in row) for row in drawn]
    (path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*texts, "a"]))
    return SimpleNamespace(path=path, models=models, texts=texts, tokenizer=tokenizers[400])


def run(folder, *words, code=0):
    done = CliRunner().invoke(app, [str(folder / word) if (folder / word).exists() else word for word in words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stderr if code else done.stdout


def test_masked_language_models_by_their_loss(folder):
    given = ["--texts", "texts.jsonl", "--length", "40", "--length", "60", "--count", "3"]
    found = json.loads(run(folder, "eval", "endless", "endless-t5", *given, "--json"))
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()][:3]
    tokenizer, curves = AutoTokenizer.from_pretrained(folder / "endless"), []
    for name in ("endless", "endless-t5"):
        model = AutoModelForMaskedLM.from_pretrained(folder / name)
        curves.append(diagnostics.length_curve(model, texts, tokenizer=tokenizer, lengths=[40, 60]))
    assert found["measure"] == "masked loss" and found["texts"] == 3
    for place, tokens in enumerate(("40", "60")):
        rows, (own, other) = found["rows"][tokens], (curve.by_text[:, place].numpy() for curve in curves)
        assert rows["endless"]["loss"] == pytest.approx(own.mean(), rel=1e-5) and rows["endless"]["difference"] is None
        half = T2 * own.std(ddof=1) / 3**0.5
        assert rows["endless"]["interval"] == pytest.approx([own.mean() - half, own.mean() + half], rel=1e-4)
        gap, half = (other - own).mean(), T2 * (other - own).std(ddof=1) / 3**0.5
        assert rows["endless-t5"]["difference"]["value"] == pytest.approx(gap, abs=1e-5)
        assert rows["endless-t5"]["difference"]["interval"] == pytest.approx([gap - half, gap + half], abs=1e-4)
    said = run(folder, "eval", "short", "endless", *given)
    assert "40 tokens" in said and "short supports none of these lengths" in said
    assert "Error: No model supports 40 tokens" in run(folder, "eval", "short", *given, code=1)


def test_others_by_retrieval(folder):
    given = ["eval", "embeds", "embeds-endless", "--texts", "texts.jsonl", "--queries", "questions.jsonl"]
    found = json.loads(run(folder, *given, "--length", "16", "--length", "62", "--json"))["rows"]
    assert [*found["16"]] == ["embeds", "embeds-endless"]
    ways = ["embeds, truncated at 24", "embeds, chunked by 24, mean", "embeds, chunked by 24, max", "embeds-endless"]
    assert [*found["62"]] == ways and found["62"][ways[0]]["difference"] is None
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "embeds")
    embeddings = []
    for model in (stock("bert"), hf_posenc.patch(stock("bert"), "alibi")):
        read = Embedder(model, tokenizer)
        documents = [cut(tokenizer, row["document"], 16) for row in rows]
        embeddings.append(metrics.ranked(read([row["query"] for row in rows]) @ read(documents).T))
    assert found["16"]["embeds"]["score"]["mrr"] == pytest.approx(embeddings[0].reciprocals.mean(), rel=1e-5)
    difference = embeddings[1].reciprocals.mean() - embeddings[0].reciprocals.mean()
    assert found["16"]["embeds-endless"]["difference"]["value"] == pytest.approx(difference, abs=1e-6)
    assert "24 of your queries" in run(folder, *given, "--length", "16")


@torch.no_grad()
def vector(model, tokenizer, text):
    """The mean of the hidden states of one text."""
    mean = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].double().mean(0)
    return mean / mean.norm()


def mean_reciprocal_rank(scores):
    """Of similarities by query; query i belongs to document i. Ties are in random order."""
    found = []
    for i, row in enumerate(scores):
        above = sum(other > row[i] + metrics.TIE for other in row)
        level = sum(abs(other - row[i]) <= metrics.TIE for other in row)
        found.append(sum(1 / (above + place) for place in range(1, level + 1)) / level)
    return sum(found) / len(found)


def test_chunks_of_models_that_read_whole_documents(folder):
    names = ["embeds-windows", "embeds-endless"]
    given = ["eval", *names, "--texts", "texts.jsonl", "--queries", "questions.jsonl", "--chunks", "20"]
    found = json.loads(run(folder, *given, "--length", "20", "--length", "62", "--json"))
    assert [*found["rows"]["20"]] == names
    ways = [[name, f"{name}, chunked by 20, mean", f"{name}, chunked by 20, max"] for name in names]
    assert [*found["rows"]["62"]] == [way for each in ways for way in each]
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    tokenizer, expected, amounts = AutoTokenizer.from_pretrained(folder / "embeds"), {}, {}
    for name, (whole, mean, best) in zip(names, ways, strict=True):
        model = AutoModel.from_pretrained(folder / name)
        asked = [vector(model, tokenizer, row["query"]) for row in rows]
        documents = [cut(tokenizer, row["document"], 62) for row in rows]
        pieces = [[vector(model, tokenizer, piece) for piece in chunk(tokenizer, text, 20)] for text in documents]
        means = [sum(each) / sum(each).norm() for each in pieces]
        wholes = [vector(model, tokenizer, text) for text in documents]
        expected[whole] = mean_reciprocal_rank([[(a @ b).item() for b in wholes] for a in asked])
        expected[mean] = mean_reciprocal_rank([[(a @ b).item() for b in means] for a in asked])
        expected[best] = mean_reciprocal_rank([[max((a @ b).item() for b in each) for each in pieces] for a in asked])
        amounts |= {whole: 1, mean: 1, best: sum(map(len, pieces)) / len(pieces)}
    actual = {way: row["score"]["mrr"] for way, row in found["rows"]["62"].items()}
    assert actual == pytest.approx(expected, abs=0.01)
    assert {way: row["vectors"] for way, row in found["rows"]["62"].items()} == amounts and amounts[ways[0][2]] >= 3
    said = run(folder, *given, "--length", "62")
    assert all(f"{value:.3f}" in said for value in actual.values())


@torch.no_grad()
def negative_log_likelihood(model, ids, window):
    """The mean over tokens, each in the first window that has it. Windows start every half window."""
    found, start = [], 0
    while len(found) < len(ids) - 1:
        logits = model(torch.tensor([ids[start : start + window]])).logits[0]
        for place in range(len(found) + 1, min(start + window, len(ids))):
            found.append(-logits[place - start - 1].log_softmax(-1)[ids[place]].item())
        start += window // 2
    return sum(found) / len(found)


def test_causal_language_models_by_perplexity(causal):
    given = ["--texts", "texts.jsonl", "--length", "64", "--length", "200"]
    found = json.loads(run(causal.path, "eval", "short", "endless", *given, "--json"))
    assert found["measure"] == "perplexity" and found["texts"] == 3 and "passkeys" not in found
    assert {tokens: by["short"]["window"] for tokens, by in found["rows"].items()} == {"64": 64, "200": 100}
    for tokens, windows in {"64": (64, 64), "200": (100, 200)}.items():
        own, other = (
            np.array(
                [
                    negative_log_likelihood(
                        copy.deepcopy(causal.models[name]).double(), causal.tokenizer(text)["input_ids"][:200], window
                    )
                    for text in causal.texts
                ]
            )
            for name, window in zip(("short", "endless"), windows, strict=True)
        )
        rows = found["rows"][tokens]
        assert rows["short"]["perplexity"] == pytest.approx(math.exp(own.mean()), rel=1e-4) and rows["short"]["ratio"] == 1
        assert rows["endless"]["perplexity"] == pytest.approx(math.exp(other.mean()), rel=1e-4)
        gap, half = (other - own).mean(), T2 * (other - own).std(ddof=1) / 3**0.5
        assert rows["endless"]["ratio"] == pytest.approx(math.exp(gap), rel=1e-4)
        assert rows["endless"]["ratio_interval"] == pytest.approx([math.exp(gap - half), math.exp(gap + half)], rel=1e-3)
    said = re.sub(r"\s+", " ", run(causal.path, "eval", "short", "endless", *given))
    assert "windows of 100" in said and "1 texts of fewer than 2 tokens are omitted" in said
    assert "No model supports 200 tokens" in run(causal.path, "eval", "short", *given)


def test_passkeys_by_greedy_decoding(causal, monkeypatch):
    monkeypatch.setattr(passkeys, "DIGITS", 1)  # so that a random model finds some
    least = passkeys.least_length(causal.tokenizer)
    assert 40 < least < 95
    given = ["--texts", "texts.jsonl", "--passkey", "--keys", "5", *(f"--length={n}" for n in (least - 1, least + 11, 130))]
    found = json.loads(run(causal.path, "eval", "short", "endless", *given, "--json"))["passkeys"]
    assert {tokens: [*by] for tokens, by in found.items()} == {str(least + 11): ["short", "endless"], "130": ["endless"]}
    for tokens, by in found.items():
        hits = {name: [] for name in by}
        for name, row in by.items():
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                for each in passkeys.passkeys(causal.tokenizer, int(tokens), depth, 5, seed=0):
                    prompt = torch.tensor([each.prompt])
                    how = {"max_new_tokens": 1, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
                    made = causal.models[name].generate(prompt, **how)
                    hits[name].append(causal.tokenizer.decode(made[0, -1]) == each.key)
                assert row["by_depth"][str(depth)] == pytest.approx(sum(hits[name][-5:]) / 5)
            assert row["accuracy"] == pytest.approx(sum(hits[name]) / 25) and row["keys"] == 25
        gap = by["endless"]["difference"]
        expected = (sum(hits["endless"]) - sum(hits.get("short", []))) / 25
        assert gap is None if "short" not in by else gap["value"] == pytest.approx(expected)
    assert {0 < row["accuracy"] < 1 for by in found.values() for row in by.values()} >= {True}
    said = re.sub(r"\s+", " ", run(causal.path, "eval", "short", "endless", *given))
    assert "short supports 100 tokens, so passkeys in 130 tokens are omitted for it" in said and "endless, depth 75%" in said
    assert f"Passkeys need inputs of at least {least} tokens" in said


def test_passkeys_at_one_depth_are_one_observation(causal):
    """Their prompts differ only in the key, so more keys don't narrow the interval."""

    model, tokenizer = copy.deepcopy(causal.models["endless"]), causal.tokenizer
    digits = torch.tensor(tokenizer.convert_tokens_to_ids([*"0123456789"]))

    def half_blind(model, args, inputs, output):
        """Only keys in the second half are found."""
        for row, logits in zip(inputs["input_ids"], output.logits, strict=True):
            key = torch.isin(row, digits).nonzero()[:5, 0]
            logits.zero_()[range(5), row[key]] = float(key[0] > len(row) / 2)

    model.register_forward_hook(half_blind, with_kwargs=True)
    length = passkeys.least_length(tokenizer) + 60
    few, many = (passkeys.evaluate({"model": (model, tokenizer)}, [length], keys)[length]["model"] for keys in (2, 8))
    assert 0 < few.accuracy == many.accuracy < 1 and (few.keys, many.keys) == (10, 40)
    assert many.interval == pytest.approx(few.interval)


def test_all_tokens_of_a_key_count():
    """Keys may have different numbers of tokens."""
    asked = [((5, 6, 7), (1, 2)), ((5, 6, 8, 9), (3,)), ((5, 6, 7), (1, 4)), ((7, 6, 9, 9), (4,))]
    following = {7: 1, 9: 3, 1: 2}

    class Model(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids):
            rows = torch.tensor([[following.get(token, 0) for token in row] for row in input_ids.tolist()])
            return SimpleNamespace(logits=torch.nn.functional.one_hot(rows, 10).float())

    prompts = [passkeys.Passkey(prompt, answer, 0, "") for prompt, answer in asked]
    assert passkeys.found(Model(), prompts).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("part", [0, 0.3, 1])
def test_a_passkey_lies_where_it_is_asked_for(causal, part):
    least = passkeys.least_length(causal.tokenizer)
    for each in passkeys.passkeys(causal.tokenizer, least + 99, part, 3, seed=0):
        assert len(each.prompt) + len(each.answer) == least + 99
        assert causal.tokenizer.decode(each.answer) == each.key and len(each.key) == passkeys.DIGITS == len(each.answer)
        text = causal.tokenizer.decode(each.prompt)
        assert text.count(each.key) == 2 and text.startswith(passkeys.TASK) and text.endswith(f"{passkeys.QUESTION} ")
        assert causal.tokenizer.decode(each.prompt[each.depth :]).startswith(passkeys.FACT.format(key=each.key))
        before = each.depth - len(causal.tokenizer(passkeys.TASK)["input_ids"])
        assert before == round(part * 100)
        # The prompt and answer are the causal.tokenizer's output for the text.
        assert tuple(causal.tokenizer(text + each.key)["input_ids"]) == each.prompt + each.answer


def test_passkeys_differ_and_come_out_the_same(causal):
    length = passkeys.least_length(causal.tokenizer) + 20
    first, again = (passkeys.passkeys(causal.tokenizer, length, 0.5, 8, seed=1) for _ in range(2))
    assert first == again and len({each.key for each in first}) == 8
    assert {each.key for each in first}.isdisjoint(
        each.key for each in passkeys.passkeys(causal.tokenizer, length, 0.5, 8, seed=2)
    )


def test_no_room_for_filler(causal):
    least = passkeys.least_length(causal.tokenizer)
    with pytest.raises(ValueError, match=f"length={least - 1} .* take {least - 1} tokens"):
        passkeys.passkey(causal.tokenizer, least - 1, 0.5, "12345")
    with pytest.raises(ValueError, match=r"part=1\.5"):
        passkeys.passkeys(causal.tokenizer, least, 1.5, 1, 0)


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


def test_which_digits_are_right(causal):
    prompts = passkeys.passkeys(causal.tokenizer, 900, 0.5, 5, seed=0)  # several batches
    found = passkeys.right(Answering(prompts, wrong=3), prompts)
    assert found.tolist() == [[True, True, True, False, True]] * 5


def test_classifiers_by_length(folder):
    given = ["eval", "classes", "classes-endless", "--texts", "labeled.jsonl", "--length", "15", "--length", "31"]
    found = json.loads(run(folder, *given, "--json"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "classes")
    rows = [json.loads(line) for line in (folder / "labeled.jsonl").read_text().splitlines()]
    wanted, predicted = [i % 3 for i in range(24)], {}
    assert {row["label"] for row in rows} == {"water", "earth", "7", 7}
    for name in ("classes", "classes-endless"):
        model, predicted[name] = AutoModelForSequenceClassification.from_pretrained(folder / name), []
        for row in rows:
            ids = tokenizer(row["text"])["input_ids"]
            ids = ids if name == "classes-endless" or len(ids) <= 24 else [*ids[:23], ids[-1]]
            predicted[name].append(model(torch.tensor([ids])).logits.argmax().item())
    # Texts have 7, 9, … tokens.
    places = {(0, 15): range(5), (15, 31): range(5, 13), (31, None): range(13, 24)}
    edges = [(each["above"], each["up_to"]) for each in found["buckets"]]
    assert edges == [*places] and [each["texts"] for each in found["buckets"]] == [5, 8, 11]
    for each, chosen in zip([*found["buckets"], found["all"]], [*places.values(), range(24)], strict=True):
        shares = []
        for name, row in each["rows"].items():
            shares.append(sum(predicted[name][i] == wanted[i] for i in chosen) / len(chosen))
            f1 = f1_score([wanted[i] for i in chosen], [predicted[name][i] for i in chosen], average="macro")
            assert row["accuracy"] == pytest.approx(shares[-1]) and row["macro_f1"] == pytest.approx(f1)
        assert each["rows"]["classes-endless"]["difference"]["value"] == pytest.approx(shares[1] - shares[0])
    assert shares[0] != shares[1]
    assert "1 to 128" in run(folder, "eval", "classes", "--texts", "labeled.jsonl")


def test_labels_that_are_ids():
    """They need classes of the same number in all models."""
    one = SimpleNamespace(num_labels=2, label2id={"a": 0, "b": 1})
    other = SimpleNamespace(num_labels=2, label2id={"a": 1, "b": 0})
    classification.check_ids_agree({"one": one, "other": other}, ["a", "b"])
    classification.check_ids_agree({"one": one, "other": SimpleNamespace(label2id={"x": 0, "y": 1})}, [0])
    with pytest.raises(ValueError, match="label 1 .* one and other"):
        classification.check_ids_agree({"one": one, "other": other}, ["a", 1])
    assert classification.label_ids("other", ["a", "b", "a"], other).tolist() == [1, 0, 1]
    assert classification.label_ids("other", [1, "0"], other).tolist() == [1, 0]
    with pytest.raises(ValueError, match="'a'"):
        classification.label_ids("other", ["a", 0], other)
    numerals = SimpleNamespace(num_labels=3, label2id={"1": 0, "2": 1, "3": 2})
    assert classification.label_ids("numerals", [0, 1, 2], numerals).tolist() == [0, 1, 2]
    assert classification.label_ids("numerals", [1, "2", 3], numerals).tolist() == [0, 1, 2]


def test_queries_that_share_a_document(monkeypatch):
    """A document is one candidate, however many queries have it."""
    pairs = [model_comparison.Pair(f"{place} {number}", f"document {place}") for place in range(10) for number in range(3)]

    def similarity(queries, documents, title):
        return torch.tensor([[float(query.split()[0] == document.split()[1]) for document in documents] for query in queries])

    strategy = RetrievalStrategy("perfect", similarity)
    monkeypatch.setattr(model_comparison, "strategies", lambda *args: [strategy])
    monkeypatch.setattr(model_comparison, "cut", lambda tokenizer, text, length: text)
    found = model_comparison.compare_models({"perfect": SimpleNamespace(tokenizer=None)}, pairs, [8])
    assert found[8]["perfect"].score.mrr == 1.0


TEXTS = ("--texts", "texts.jsonl")
QUESTIONS = (*TEXTS, "--queries", "questions.jsonl")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("eval", "short", "embeds", *TEXTS), "short by masked loss, embeds by retrieval"),
        (("eval", "short", *QUESTIONS), "--queries doesn't apply to short"),
        (("eval", "short", *TEXTS, "--chunks", "9"), "--chunks doesn't apply to short"),
        (("eval", "embeds", *TEXTS, "--passkey"), "--passkey doesn't apply to embeds, which is evaluated by retrieval"),
        (("eval", "embeds", *TEXTS, "--label-column", "text"), "--label-column doesn't apply to embeds"),
        (("eval", "embeds", *TEXTS, "--keys", "2"), "--keys 2 applies only to --passkey"),
        (("eval", "embeds", *QUESTIONS, "--chunks", "25"), "--chunks 25 is above the maximum length of embeds"),
        (("eval", "embeds", *QUESTIONS, "--count", "19"), "--count 19 is too small"),
        (("eval", "short", *TEXTS, "--count", "1"), "1 texts are too few"),
        (("eval", "classes", *TEXTS), "has no column 'label'"),
        (("eval", "classes", "--texts", "labeled.jsonl", "--label-column", "kind"), "has no column 'kind'"),
        (("eval", "classes", "--texts", "odd.jsonl", "--label-column", "kind"), "The label 'fire' isn't a class of classes"),
        (("eval", "classes", "--texts", "odd.jsonl", "--label-column", "none"), "must be a label"),
        (("eval", "scores", "--texts", "labeled.jsonl"), "scores has num_labels=1"),
        (("eval", "short", "short", *TEXTS), "Two models are named 'short'"),
        (("bench", "short", "--length", "999"), "length=999 is above the maximum length of short"),
        (("bench", "short", "--device", "nothing"), "--device 'nothing'"),
    ],
)
def test_refused(folder, words, error):
    assert error in run(folder, *words, code=1)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("short", "foreign"), "short and foreign tokenize the texts differently"),
        (("short", "--length", "101"), "No model supports these lengths. Choose lengths of at most 100"),
    ],
)
def test_refused_decoders(causal, words, error):
    assert error in run(causal.path, "eval", *words, *TEXTS, code=1)


def test_speeds(folder):
    found = json.loads(run(folder, "bench", "short", "endless", "--length", "8", "--length", "64", "--rounds", "2", "--json"))
    assert found["8"].keys() == {"short", "endless"} and found["64"].keys() == {"endless"}
    assert found["8"]["short"]["ratio"] is None and found["64"]["endless"]["ratio"] is None
    assert found["8"]["endless"]["ratio"] > 0 and found["8"]["short"]["milliseconds"] > 0


def test_ratios_are_of_rounds():
    speed = throughput._speed([0.5, 2.0, 4.0], 100, [1.0, 2.0, 2.0])
    assert speed == throughput.Speed(2000.0, 50.0, 1.0, (0.75, 1.5))
