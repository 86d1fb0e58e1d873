"""Patched models in other tools: a pipeline beyond the original maximum length, and Trainer."""

import logging

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)

import hf_posenc
from models import first, patched, slow, stock, tokens

others_warn = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def test_features_of_a_long_text(minilm, tmp_path, caplog, monkeypatch):
    """Beyond MiniLM's 512 tokens, a tokenizer with the new maximum length neither warns nor truncates."""
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


@others_warn
@pytest.mark.parametrize(("host", "encoding"), [("roberta", "learned+shaw"), slow("mpnet", "relative")])
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
    assert any("posenc." in name for name in moved) and not any("posenc.original." in name for name in moved)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "halved" / "checkpoint-6")
    assert torch.equal(first(reloaded(tokens())), first(whole.model.eval()(tokens())))


@others_warn
def test_trainer_with_evaluation_and_label_smoothing(tmp_path):
    run = trainer(tmp_path, "t5", label_smoothing_factor=0.1, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True)
    run.train()
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric, rel=1e-5)


def test_label_smoothing_shifts_the_labels_of_a_language_model(tmp_path):
    """Trainer recognizes causal language models by their class names."""
    host = stock("gpt2", "LMHeadModel")
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens()), "labels": tokens()}
    losses = [
        Trainer(model, arguments).compute_loss(model, dict(inputs))
        for model in (host, hf_posenc.patch(host, "learned", init="host"))
    ]
    assert torch.equal(*losses)
