"""Measure the loading time of a BERT with many small layers, original and patched: `python -m benchmarks.deep_models`.

The weights are small, so the cost per layer dominates. shaw and t5 have parameters in each layer. The models take turns. Times
are process times on one thread, without the first round.
"""

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, BertConfig, BertModel

import hf_posenc
from hf_posenc.evaluation import terminals

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100}
STOCK = "stock"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--encodings", default="alibi,rope,sinusoidal,shaw,t5", help="separated by commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = [STOCK, *args.encodings.split(",")]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            model = BertModel(BertConfig(**SIZES, num_hidden_layers=args.layers))
            options: dict[str, Any] = {"per_layer": True} if name == "t5" else {}
            patched = model if name == STOCK else hf_posenc.patch(model, name, **options)
            patched.save_pretrained(Path(folder, name))
        for number in range(args.rounds + 1):
            for name in names:
                gc.collect()
                started = time.process_time()
                AutoModel.from_pretrained(Path(folder, name))
                if number:
                    seconds[name].append(time.process_time() - started)
    stock = statistics.median(seconds[STOCK])
    print(f"BERT with {args.layers} layers, median of {args.rounds} loads")
    for name in names:
        median = statistics.median(seconds[name])
        print(f"{name:12}{median:7.2f} s  {median / stock:5.2f} × stock")


if __name__ == "__main__":
    terminals.set_up()
    main()
