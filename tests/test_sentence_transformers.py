"""Patched models in sentence-transformers: as encoders, in training, and as cross-encoders."""

import json

import pytest
import torch
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import hf_posenc
from closeness import assert_apart, assert_close
from conftest import WORDS, run_python
from models import HOSTS, LENGTH, first, patched, stock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


SENTENCES = """
import json, sys, torch, hf_posenc
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1])
texts, expected = torch.load(sys.argv[2], weights_only=False)
embeddings = torch.from_numpy(model.encode(texts))
print(json.dumps([model.max_seq_length, model.tokenizer.model_max_length, torch.equal(embeddings, expected)]))
back = hf_posenc.unpatch(model)
print(json.dumps([back.max_seq_length, type(back[0].model).__name__]))
"""


def test_sentence_transformer(minilm, tmp_path):
    from sentence_transformers import SentenceTransformer

    stock_model = SentenceTransformer(minilm, device="cpu")
    texts = ["positions " * 530, "a short one"]
    before = stock_model.encode(texts)
    model = hf_posenc.patch(stock_model, "alibi", max_length=540)
    assert type(model) is SentenceTransformer and type(model[0].model).__name__ == "PosEncBertModel"
    assert model.max_seq_length == model.tokenizer.model_max_length == 540
    assert stock_model.max_seq_length == 256 and (stock_model.encode(texts) == before).all()
    assert next(model.parameters()) is next(stock_model.parameters())
    embeddings = model.encode(texts)
    fewer = torch.from_numpy(model.encode(["positions " * 515])[0])
    assert_apart(fewer, torch.from_numpy(embeddings[0]))  # not truncated before 530 words
    model.save_pretrained(str(tmp_path / "saved"))
    torch.save((texts, torch.from_numpy(embeddings)), tmp_path / "expected.pt")
    loaded, back = run_python(SENTENCES, tmp_path / "saved", tmp_path / "expected.pt").splitlines()[-2:]
    assert loaded == "[540, 540, true]" and back == '[256, "BertModel"]'
    assert (hf_posenc.unpatch(model).encode(["a short one"]) == stock_model.encode(["a short one"])).all()
    with pytest.raises(ValueError, match="Unknown position encoding 'alibbi'"):
        hf_posenc.patch(stock_model, "alibbi")


UNLIMITED = """
import json, sys, hf_posenc
from sentence_transformers import SentenceTransformer
for folder in sys.argv[1:]:
    model = SentenceTransformer(folder)
    tokens = model.preprocess(["positions " * 600])["input_ids"].shape[1]
    print(json.dumps([model.max_seq_length, tokens, hf_posenc.unpatch(model).max_seq_length]))
"""


def test_the_length_follows_the_model(minilm, tmp_path):
    """Without a length limit, nothing is truncated, even after reloading, which uses config.max_position_embeddings as the
    limit. `unpatch` restores the previous length.
    """
    from sentence_transformers import SentenceTransformer

    stock_model = SentenceTransformer(minilm, device="cpu")
    model = hf_posenc.patch(stock_model, "alibi")
    assert model.max_seq_length == VERY_LARGE_INTEGER and stock_model.max_seq_length == 256
    model.save_pretrained(str(tmp_path / "unlimited"))
    model.max_seq_length = 550
    model.save_pretrained(str(tmp_path / "by hand"))
    lines = run_python(UNLIMITED, tmp_path / "unlimited", tmp_path / "by hand").splitlines()[-2:]
    assert [json.loads(line) for line in lines] == [[VERY_LARGE_INTEGER, 602, 256], [550, 550, 256]]
    assert hf_posenc.patch(stock_model, "learned").max_seq_length == 512
    back = hf_posenc.unpatch(hf_posenc.patch(stock_model, "alibi", max_length=128))
    back.save_pretrained(str(tmp_path / "back"))
    assert back.max_seq_length == 256 and "max_seq_length" not in (tmp_path / "back" / "sentence_bert_config.json").read_text()
    assert SentenceTransformer(str(tmp_path / "back"), device="cpu").max_seq_length == 256
    longer = hf_posenc.extend(hf_posenc.patch(stock_model, "alibi", max_length=128), 600)
    assert longer.max_seq_length == 600 and hf_posenc.unpatch(longer).max_seq_length == 256
    original = model[0].model.config.position_encoding["original"]
    assert original["max_seq_length"] == 256
    assert "max_seq_length" not in patched("bert", "alibi").config.position_encoding["original"]


@pytest.mark.parametrize("host", ["bert", "roberta"])
def test_sentence_transformer_from_a_patched_folder(host, tokenizer, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    model = patched(host, "shaw", max_length=LENGTH + 9)
    assert model.config.max_position_embeddings == LENGTH + 9 + HOSTS[host].offset
    model.save_pretrained(tmp_path / "model")
    tokenizer.model_max_length = hf_posenc.inspect(model).max_length
    tokenizer.save_pretrained(tmp_path / "model")
    part = Transformer(str(tmp_path / "model"))
    sentences = SentenceTransformer(modules=[part, Pooling(part.get_embedding_dimension())], device="cpu")
    assert sentences.max_seq_length == LENGTH + 9
    embedding = sentences.encode([" ".join(WORDS * 2)], convert_to_tensor=True)
    ids = tokenizer(" ".join(WORDS * 2), truncation=True, max_length=LENGTH + 9, return_tensors="pt")["input_ids"]
    assert_close(embedding[0], first(model(ids))[0].mean(0))
    sentences.save_pretrained(str(tmp_path / "saved"))
    assert torch.equal(
        SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode([" ".join(WORDS * 2)], convert_to_tensor=True),
        embedding,
    )


def test_sentence_transformer_in_training(minilm, tmp_path):
    """Training changes the encoding, the checkpoint reloads unchanged, and its card describes the patched model."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    stock("bert", vocab_size=30522).save_pretrained(tmp_path / "stock")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "stock")
    before = SentenceTransformer(str(tmp_path / "stock"), device="cpu")
    model = hf_posenc.patch(before, "relative", max_length=64)
    start = model[0].model.posenc.weight.clone()
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=2, learning_rate=1e-2, report_to="none", use_cpu=True, disable_tqdm=True
    )
    pairs = Dataset.from_dict({"anchor": ["a dog", "a man"] * 8, "positive": ["dogs", "men"] * 8})
    loss = losses.MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss).train()
    assert not torch.equal(model[0].model.posenc.weight, start)
    again = SentenceTransformer(str(tmp_path / "run" / "checkpoint-2"), device="cpu")
    assert (again.encode(["a dog bit"]) == model.encode(["a dog bit"])).all() and again.max_seq_length == 64
    card = (tmp_path / "run" / "checkpoint-2" / "README.md").read_text()
    assert "64 tokens" in card and "PosEncBertModel" in card
    assert before.model_card_data.model is before and "generated_from_trainer" not in before.model_card_data.tags


def test_cross_encoder(minilm, tmp_path):
    from sentence_transformers import CrossEncoder

    stock("bert", "ForSequenceClassification", vocab_size=30522, num_labels=1).save_pretrained(tmp_path / "stock")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "stock")
    model = hf_posenc.patch(CrossEncoder(str(tmp_path / "stock"), device="cpu"), "alibi", max_length=64)
    pair = [("a dog " * 20, "a man")]
    scores = model.predict(pair)
    model.save_pretrained(str(tmp_path / "saved"))
    again = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    assert type(model) is CrossEncoder and again.max_seq_length == 64 and (again.predict(pair) == scores).all()
