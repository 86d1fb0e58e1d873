"""A repository that somebody else changes, too: `FOLDER`. HF_ENDPOINT and HF_TOKEN are those of a Hub."""

import sys
from pathlib import Path

import torch
from huggingface_hub import HfApi, hf_hub_download
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

import hf_posenc

FOLDER, REPO = Path(sys.argv[1]), "me/bert-alibi"
SIZES = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))


def made(seed, encoding):
    torch.manual_seed(seed)
    return hf_posenc.patch(BertForMaskedLM(BertConfig(**SIZES)), encoding).eval()


def is_at_the_hub(model, **revision):
    with torch.no_grad():
        loaded = AutoModelForMaskedLM.from_pretrained(REPO, **revision)
        return torch.equal(loaded(IDS).logits, model(IDS).logits)


first, second = made(0, "alibi"), made(1, "shaw")
start = hf_posenc.push_to_hub(first, REPO, private=True)
assert is_at_the_hub(first)

api = HfApi()
card = Path(hf_hub_download(REPO, "README.md")).read_text() + "\nSomebody's remark.\n"
api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=REPO)
foreign = api.upload_file(path_or_fileobj=b"notes", path_in_repo="notes.txt", repo_id=REPO)
assert is_at_the_hub(first)

end = hf_posenc.push_to_hub(second, REPO)
assert is_at_the_hub(second) and is_at_the_hub(first, revision=start.oid) and is_at_the_hub(first, revision=foreign.oid)
assert Path(hf_hub_download(REPO, "notes.txt")).read_bytes() == b"notes"
assert "Somebody's remark." in Path(hf_hub_download(REPO, "README.md")).read_text()
assert end.oid == api.model_info(REPO).sha
