"""Convert the experiments' records to results for a model's evaluation.json."""

from hf_posenc.evaluation.records import LIBRARY, Record

DEEP = "a sentence from beyond the first 512 tokens, taken out, finds its document"


def of_demo(record: Record) -> list[Record]:
    """The results of demo.py: retrieval over all modules, and by text beyond the first 512 tokens."""
    return [
        *_retrieval("a summary finds its module", {record["max_seq_length"]: record["scores"]}, "trained"),
        *_retrieval(DEEP, {record["long_length"]: record["deep"]}, "trained"),
    ]


def of_conversions(record: Record, this: str) -> list[Record]:
    """The results of conversions.py on the standard library. `this`: the model whose evaluation.json gets them."""
    beside = ("bag of words", "minilm", f"{this}, calibrated", this)
    shown = {name: score for name, score in record["scores"].items() if name in beside}
    return _retrieval("a summary finds its module", {record["text_length"]: shown}, this)


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


def of_seeds(record: Record, this: str, dataset: Record, length: int | None) -> list[Record]:
    """The results of seeds.py: means over seeds with Student's intervals. `this`: the model that gets them."""
    return [
        {
            "model": model,
            "this": model == this,
            "task": "text-classification",
            "dataset": {**dataset, "split": "validation"},
            "metric": metric.removeprefix("eval_"),
            "value": mean,
            "interval": [mean - half, mean + half],
            "length": length,
            "seeds": found["seeds"],
        }
        for model, found in record["models"].items()
        for metric, (mean, half) in found["mean_and_half_width"].items()
    ]
