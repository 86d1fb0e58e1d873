r"""What a calibration without training keeps, by recipe: MiniLM converted to `t5` and `relative`, on three corpora.

    python -m experiments.calibration --pages LINUX POSTGRESQL --output_dir scripts/results

The corpora and questions are those of experiments/exportable.py. Each model is calibrated on the training pages of its corpus.
Vectors by range were chosen by the cosine of embeddings on other training pages, before these questions were answered. Then,
256 tokens were kept as the default, because 512 take three times as long and aren't better here. Models are evaluated in
bfloat16. 20 minutes on one CPU core.
"""

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel

import hf_posenc
from experiments.exportable import LENGTHS, MINILM, corpora
from hf_posenc.evaluation import records, terminals
from hf_posenc.evaluation.metrics import Ranks, paired, ranked, score
from hf_posenc.evaluation.retrieval import embed
from hf_posenc.serialization.atomic import write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

ONE_VECTOR, RANGES = "one vector", "vectors by range"
RECIPES = [
    ("t5", ONE_VECTOR, 256),
    ("t5", RANGES, 256),
    ("t5", RANGES, 512),
    ("relative", ONE_VECTOR, 256),
    ("relative", RANGES, 256),
    ("relative", RANGES, 512),
]
"""Encoding, what replaces position embeddings, and the length of 24 calibration texts in tokens. 256 is the default."""


def one_vector() -> Any:
    """A context in which `convert` replaces position embeddings by one vector for all positions."""
    return mock.patch("hf_posenc.modeling.offsets.range_count", lambda length: 1)


def calibrated(stock: Any, tokenizer: Any, texts: list[str], encoding: str, vectors: str, length: int) -> tuple[Any, float]:
    """A converted model, and the processor time in seconds."""
    before = time.process_time()
    with one_vector() if vectors == ONE_VECTOR else contextlib.nullcontext():
        model = hf_posenc.convert(stock, encoding, texts=texts, tokenizer=tokenizer.__call__, calibration_length=length)
    return model, time.process_time() - before


def embedded(model: Any, tokenizer: Any, texts: list[str], length: int, title: str) -> Tensor:
    """Unit vectors in float32, `[N, D]`."""
    with torch.autocast("cpu", torch.bfloat16):
        found = embed(model, tokenizer, texts, length, title)
    return F.normalize(found.float(), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="directories of documentation")
    parser.add_argument("--output_dir", type=Path, required=True, help="directory for the record and its table")
    arguments = parser.parse_args()
    tokenizer = required_tokenizer(MINILM)
    stock, rows, lines = AutoModel.from_pretrained(MINILM).eval(), [], []
    for corpus, (pairs, training) in corpora(arguments.pages).items():
        queries, documents = map(list, zip(*pairs, strict=True))
        original: dict[int, tuple[Tensor, Tensor, Ranks]] = {}
        for encoding, vectors, length in [("", "", 0), *RECIPES]:
            name = f"{encoding}, {vectors}, {length} tokens" if encoding else "MiniLM"
            model, seconds = calibrated(stock, tokenizer, training, encoding, vectors, length) if encoding else (stock, 0.0)
            asked = embedded(model, tokenizer, queries, max(LENGTHS), f"{corpus}, {name}")
            for tokens in LENGTHS:
                found = embedded(model, tokenizer, documents, tokens, f"{corpus}, {name}, {tokens}")
                ranks = ranked(asked @ found.T)
                theirs, there, base = original.setdefault(tokens, (asked, found, ranks))
                result, difference = score(ranks), paired(ranks, base)
                share = result.mrr / score(base).mrr
                cosines = [float((a * b).sum(-1).mean()) for a, b in ((asked, theirs), (found, there))]
                row = {"corpus": corpus, "tokens": tokens, "model": name, "mrr": result.mrr, "share": share, "n": len(pairs)}
                rows.append({**row, "query_cosine": cosines[0], "document_cosine": cosines[1], "seconds": round(seconds, 1)})
                lines.append(
                    f"{corpus:18} {tokens:4}  {name:38} MRR {result.shown('mrr', 3)}  {share:6.1%}  {difference.shown(3)}  "
                    f"{cosines[0]:.3f}  {cosines[1]:.3f}  {seconds:3.0f} s"
                )
                print(lines[-1], flush=True)
    head = (
        "Corpus, tokens of a document, model, MRR with its 95% interval, share of MiniLM's MRR, paired difference with its\n"
        "interval, mean cosine of queries and of documents with MiniLM's, processor time of the calibration.\n\n"
    )
    records.write(arguments.output_dir / "calibration.json", {"rows": rows})
    write_text(arguments.output_dir / "calibration.txt", head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    terminals.set_up()
    main()
