"""Times BERT with relative_key and relative_key_query in Transformers 4.57. v4.py runs it in the environment with that version.

It doesn't import Transformers 5 or hf_posenc. It prints the results as a line of JSON.
"""

import functools
import json
import sys
from typing import Any

import torch
from transformers import BertConfig, BertModel

from benchmarks.memory import Peak
from benchmarks.timing import Run, clocked, interleaved

KINDS = {"stock": "absolute", "relative_key": "relative_key", "relative_key_query": "relative_key_query"}
HEAD_DIM, VOCABULARY = 64, 1000


def build(group: dict[str, Any], settings: dict[str, Any], name: str) -> Run:
    torch.manual_seed(settings["seed"])
    config: Any = BertConfig(  # type: ignore[call-arg]  # of another version than is checked here
        vocab_size=VOCABULARY,
        hidden_size=group["heads"] * HEAD_DIM,
        num_hidden_layers=group["layers"],
        num_attention_heads=group["heads"],
        intermediate_size=4 * group["heads"] * HEAD_DIM,
        max_position_embeddings=group["length"],
        position_embedding_type=KINDS[name],
        hidden_dropout_prob=group["dropout"],
        attention_probs_dropout_prob=group["dropout"],
        attn_implementation="sdpa" if name == "stock" else "eager",  # the others support only eager attention
    )
    model: Any = BertModel(config)
    model.to(getattr(torch, group["dtype"])).train(group["trained"])
    ids = torch.randint(0, VOCABULARY, (group["batch"], group["length"]))

    def run() -> None:
        with torch.set_grad_enabled(group["trained"]):
            states = model(ids).last_hidden_state
            if group["trained"]:
                states.float().square().mean().backward()

    return clocked(run, clock=settings["clock"], after=lambda: model.zero_grad(set_to_none=True))


def main() -> None:
    group = json.loads(sys.argv[1])
    settings = group["settings"]
    torch.set_num_threads(settings["threads"])
    timed = interleaved(
        KINDS, functools.partial(build, group, settings), settings["rounds"], settings["warmup"], settings["seed"]
    )
    peaks = {}
    for name, run in timed.runs.items():
        with Peak() as peak:
            run()
            peak.start()
            run()
        peaks[name] = round(peak.bytes / 1e6, 2)
    print(json.dumps({"seconds": timed.seconds, "failures": timed.failures, "peak_mb": peaks}))


if __name__ == "__main__":
    main()
