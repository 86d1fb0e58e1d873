"""Convert the experiments' records to results for a model's evaluation.json."""

from hf_posenc.evaluation.records import LIBRARY, Record

DEEP = "a sentence from beyond the first 512 tokens, taken out, finds its document"


def of_demo(record: Record) -> list[Record]:
    """The results of demo.py: retrieval over all modules, and by text beyond the first 512 tokens."""
    return [
        *_retrieval("a summary finds its module", {record["max_seq_length"]: record["scores"]}, "trained"),
        *_retrieval(DEEP, {record["long_length"]: record["deep"]}, "trained"),
    ]


def of_lengths(record: Record, this: str) -> list[Record]:
    """The results of eval_length.py. `this`: the model whose evaluation.json gets them."""
    settings = record["settings"]
    size = f"one of {settings['documents']} of {max(settings['lengths'])} tokens or more, cut at a length"
    kinds = {
        "title": f"a title finds its document, {size}",
        "deep": f"{DEEP}, {size}",
        "needle": f"a fact within the first 512 tokens, among {settings['candidates']} copies",
        "needle beyond": f"a fact beyond the first 512 tokens, among {settings['candidates']} copies",
    }
    texts = settings.get("texts", LIBRARY)
    results = [
        result for task, by_length in record["scores"].items() for result in _retrieval(kinds[task], by_length, this, texts)
    ]
    return results + [
        {
            "model": model,
            "this": model == this,
            "task": "text-generation",
            "dataset": {"name": texts, "config": f"windows of {found['window']} tokens"},
            "metric": "perplexity",
            "value": found["perplexity"],
            "interval": found["perplexity_interval"],
            "length": int(length),
            "count": found["documents"],
        }
        for length, by_model in record.get("perplexity", {}).items()
        for model, found in by_model.items()
    ]


def _retrieval(kind: str, by_length: Record, this: str, texts: str = LIBRARY) -> list[Record]:
    return [
        {
            "model": model,
            # A model with a length limit is used with truncation.
            "this": model == this or model.startswith(f"{this}, truncated at "),
            "task": "text-retrieval",
            "dataset": {"name": texts, "config": kind},
            "metric": metric,
            "value": score[metric],
            "interval": score[f"{metric}_interval"],
            "length": int(length),
            "count": score["queries"],
        }
        for length, scores in by_length.items()
        for model, score in scores.items()
        for metric in ("recall_at_1", "mrr")
    ]
