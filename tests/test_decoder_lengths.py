"""experiments/decoder_lengths.py: models, losses by position, a run that continues, and its report."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from closeness import assert_close, assert_equal
from experiments import decoder_lengths
from experiments.data import pages
from hf_posenc.evaluation import perplexity, records
from models import LLAMA, randomize

TRAINED, LENGTH, ROTATED = 128, 256, 16
SIZES = dict(LLAMA, vocab_size=300, num_attention_heads=2, num_key_value_heads=2, head_dim=ROTATED)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return randomize(LlamaForCausalLM(LlamaConfig(**SIZES | {"max_position_embeddings": TRAINED})), std=0.2).eval()


@pytest.fixture(scope="module")
def tokenizer():
    bytes_only = Tokenizer(models.BPE({sign: i for i, sign in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only)


def ids(count):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def frequencies(model):
    model(ids(LENGTH)[None])
    return model.model.rotary_emb.inv_freq


def test_longrope_has_the_factors_of_ntk_and_dynamic_those_of_factor_3(model):
    assert_close(
        frequencies(decoder_lengths.made(model, "longrope", LENGTH)), frequencies(decoder_lengths.made(model, "ntk", LENGTH))
    )
    ntk = LlamaConfig(**SIZES).rope_parameters["rope_theta"] * 3 ** (ROTATED / (ROTATED - 2))
    expected = ntk ** (-torch.arange(0, ROTATED, 2) / ROTATED)
    assert_close(frequencies(decoder_lengths.made(model, "dynamic", LENGTH)), expected)


def test_losses_in_chunks_of_logits_and_in_windows(model, monkeypatch):
    monkeypatch.setattr(perplexity, "CHUNK", 50)
    assert_close(decoder_lengths.token_losses(model, ids(LENGTH), TRAINED), perplexity.losses(model, ids(LENGTH), LENGTH))
    windowed = decoder_lengths.windowed_losses(model, ids(LENGTH), TRAINED)
    assert_close(windowed, perplexity.losses(model, ids(LENGTH), TRAINED))


def test_a_patched_model_reads_in_chunks(model, monkeypatch):
    """Within the original's length, its losses are the original's."""
    monkeypatch.setattr(decoder_lengths, "CHUNK", 50)
    grouped = decoder_lengths.made(model, "grouped", LENGTH)
    found = decoder_lengths.token_losses(grouped, ids(LENGTH), TRAINED)
    assert_close(found[: TRAINED - 1], decoder_lengths.token_losses(model, ids(TRAINED), TRAINED))
    assert len(found) == LENGTH - 1


def test_only_weights_are_cast(model):
    copied = LlamaForCausalLM(model.config)
    before = copied.model.rotary_emb.inv_freq.clone()
    decoder_lengths.cast(copied, torch.bfloat16)
    assert copied.dtype == torch.bfloat16
    assert_equal(copied.model.rotary_emb.inv_freq, before)


def test_a_run_and_its_continuation(model, tokenizer, tmp_path, monkeypatch):
    found = [pages.Page(f"{i}", f"page {i}", f"Page {i}. " + "Kernels hold 1 lock for each queue. " * 60) for i in range(3)]
    monkeypatch.setattr(pages, "split", lambda folder: (found, []))
    monkeypatch.setattr(decoder_lengths, "load_original", lambda name: (model, tokenizer))
    monkeypatch.setattr(decoder_lengths, "BIN", 64)
    monkeypatch.setattr(decoder_lengths, "cast", lambda model, kind: None)
    length, within = 1024, 512  # A prompt of bytes is long.

    def run(*more):
        given = ["--pages", "pages", "--length", str(length), "--within", str(within), "--output_dir", str(tmp_path), *more]
        decoder_lengths.main(given)
        return records.read(tmp_path / "decoder_lengths.json")

    record = run("--depths", "2", "--documents", "2", "--methods", "stock", "ntk", "--check", "1")
    assert {name: [*each] for name, each in record["passkeys"][str(length)].items()} == {"stock": ["0", "9"], "ntk": ["0", "9"]}
    assert [*record["losses"][str(length)]] == ["stock, windows", "stock", "ntk"]
    assert all(len(bins) == length // 64 for each in record["losses"][str(length)].values() for bins in each.values())
    assert record["precision"][0]["all"] == 1
    text = (tmp_path / "decoder_lengths.txt").read_text()
    assert "Paired difference from 'stock, windows'" in text and (tmp_path / "decoder_lengths.png").stat().st_size > 10_000

    measured = []
    right = decoder_lengths.right
    monkeypatch.setattr(decoder_lengths, "right", lambda *given: measured.append(1) or right(*given))
    monkeypatch.setattr(decoder_lengths, "token_losses", None)
    again = run("--depths", "2", "--documents", "2", "--methods", "stock", "ntk", "--keys", "2")
    assert len(measured) == 6  # One more key at each depth: stock at both lengths, and ntk.
    assert again["losses"] == record["losses"]
    assert again["passkeys"][str(length)]["ntk"]["9"][:1] == record["passkeys"][str(length)]["ntk"]["9"]
    with pytest.raises(SystemExit, match="begun with --seed 0, not 1"):
        run("--seed", "1")


def test_too_few_pages(tokenizer, monkeypatch):
    monkeypatch.setattr(pages, "split", lambda folder: ([], []))
    with pytest.raises(SystemExit, match="has 0 evaluation pages of 64 tokens"):
        decoder_lengths.long_documents("pages", tokenizer, 64, 2, seed=0)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--depths", "11"], "--depths 11 isn't valid. Choose a number from 1 to 10."),
        (["--length", "9000"], "--length 9000 isn't a multiple of 4096. Choose one, or set --documents 0."),
        (["--methods", "rope"], "invalid choice: 'rope'"),
    ],
)
def test_wrong_flags(capsys, more, expected):
    with pytest.raises(SystemExit):
        decoder_lengths.parse_arguments(["--pages", "pages", "--output_dir", "x", *more])
    assert expected in capsys.readouterr().err
