"""Checkpoints of Transformers v4 with relative positions, and what users do with the models that `from_v4` makes of them.

v4's recorded outputs (tests/v4) say what is right. For other inputs, lengths, heads and weights a stock model with v4's scores
does (`v4_models`).
"""

import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

import hf_posenc
from attacks.cases import Case, Comparison, Refused, Settings, new_folder, no_grad
from attacks.subjects import padded
from attacks.v4_models import (
    DATA,
    LONG,
    TABLE,
    UNSERVED,
    auto,
    change,
    hub,
    like,
    longer,
    made,
    old,
    read,
    recorded,
    reference,
    saved,
    stock_class,
    there,
)
from hf_posenc.cli import app
from hub_server import Commit, Repo
from v4_checkpoints import FAMILIES, KINDS, LENGTH, VOCABULARY, cotangent, run

WITHOUT_TEXT = ("bros", "bert-decoder", "dpr")
"""Those that need more than tokens, or give one vector a text."""
NO_DECODER = ("albert", "bros", "dpr", "esm")
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice", "NextSentencePrediction")


def alone(family: str, kind: str) -> Iterator[Comparison]:
    """Each implementation of attention against the record; and so the reference, which is used below."""
    model, folder, (inputs, expected) = made(family, kind), old(family, kind), recorded(family, kind)
    yield run(reference(stock_class(family), folder, load_file(folder / "model.safetensors")), inputs), expected
    for implementation in ("eager", "sdpa", "flex_attention")[: 3 if model._supports_flex_attn else 2]:
        model.set_attn_implementation(implementation)
        yield run(model, inputs), expected


def reloaded(family: str, kind: str) -> Iterator[Comparison]:
    """Saved, loaded by the package and by the code in the checkpoint, whole and in shards, and saved over the old files."""
    model, (inputs, expected) = made(family, kind), recorded(family, kind)
    for more in ({}, {"max_shard_size": "2KB"}):
        folder = saved(model, **more)
        yield there(folder, inputs, auto(family)), run(model, inputs)
        yield there(folder, inputs, auto(family), "bare"), expected
    folder = old(family, kind)
    hf_posenc.from_v4(folder, stock_class(family)).save_pretrained(folder)
    yield there(folder, inputs, auto(family)), expected


def by_the_hub(family: str, kind: str) -> Iterator[Comparison]:
    """From a v4 checkpoint on the Hub, in a folder of its own, to a new one there, loaded with and without the package."""
    inputs, expected = recorded(family, kind)
    files = {f"old/{file.name}": file.read_bytes() for file in old(family, kind).iterdir()}
    name = f"{family}-{kind}".replace("_", "-")
    hub().repos[f"me/{name}"] = Repo()
    hub().repos[f"me/{name}"].commits.append(Commit("v4", files))
    yield there(f"me/{name}", inputs, auto(family), call="from_v4", subfolder="old", push=f"me/{name}-new"), expected
    yield there(f"me/{name}-new", inputs, auto(family)), expected
    yield there(f"me/{name}-new", inputs, auto(family), "bare"), expected


def with_pickles(family: str, kind: str) -> Iterator[Comparison]:
    """A .bin beside the safetensors isn't read."""
    folder, (inputs, expected) = old(family, kind), recorded(family, kind)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    model = hf_posenc.from_v4(folder, stock_class(family))
    yield run(model, inputs), expected
    model.save_pretrained(folder)
    yield there(folder, inputs, auto(family)), expected


def only_pickles(family: str, kind: str) -> Iterator[Comparison]:
    folder = old(family, kind)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    yield hf_posenc.from_v4(folder, stock_class(family)), "an error"


def in_shards(family: str, kind: str) -> Iterator[Comparison]:
    """Safetensors in two files, with names of older versions, and their buffers among the weights."""
    folder, (inputs, expected) = old(family, kind), recorded(family, kind)
    weights = load_file(folder / "model.safetensors")
    prefix = f"{stock_class(family).base_model_prefix}." if any("." in name for name in weights) else ""
    weights[f"{prefix}embeddings.position_ids"] = torch.arange(LENGTH)[None]
    aged = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = {re.sub("|".join(aged), lambda found: aged[found[0]], name): each for name, each in weights.items()}
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in set(names.values()):
        save_file({name: weights[name] for name in names if names[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    model = hf_posenc.from_v4(folder, stock_class(family))
    yield run(model, inputs), expected
    model.save_pretrained(folder)
    yield there(folder, inputs, auto(family)), expected


def in_half(family: str, kind: str) -> Iterator[Comparison]:
    """A checkpoint in half precision, computed in float32 and as it is; saved and loaded in each."""
    folder, (inputs, _) = change(old(family, kind), torch_dtype="float16", dtype="float16"), recorded(family, kind)
    weights = {name: each.half() for name, each in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = run(reference(stock_class(family), folder, {name: each.float() for name, each in weights.items()}), inputs)
    yield run(hf_posenc.from_v4(folder, stock_class(family), dtype=torch.float32), inputs), expected
    model = hf_posenc.from_v4(folder, stock_class(family))
    yield {each.dtype for each in model.parameters()}, {torch.float16}
    yield there(saved(model), inputs, auto(family), dtype="float32"), run(model.float(), inputs)


def beyond(family: str, kind: str) -> Iterator[Comparison]:
    yield made(family, kind)(**longer(recorded(family, kind)[0], LENGTH + 1)), "an error"


def for_longer(family: str, kind: str) -> Iterator[Comparison]:
    """More tokens, by from_v4 or by `extend`, saved and loaded: distances beyond the last vector get that one."""
    folder, (inputs, expected) = old(family, kind), recorded(family, kind)
    oracle, long = reference(stock_class(family), folder, load_file(folder / "model.safetensors")), longer(inputs, LONG)
    if family != "bert-generation":
        extended = [made(family, kind, max_length=LONG), hf_posenc.extend(made(family, kind), LONG)]
        yield there(saved(hf_posenc.extend(extended[0], 2 * LONG)), long, auto(family)), run(oracle, long)
    else:
        extended = [hf_posenc.extend(made(family, kind), LONG, "linear")]
        table = extended[0].state_dict()["bert.posenc.learned.weight"]
        oracle.get_submodule("bert.embeddings.position_embeddings").weight[:LONG] = table
        yield table[[0, -1]], load_file(folder / "model.safetensors")["bert.embeddings.position_embeddings.weight"][[0, -1]]
    for model in extended:
        yield run(model, long), run(oracle, long)
        if family != "bert-generation":
            yield run(model, inputs), expected
        for place in ((), ("bare",)):
            yield there(saved(model), long, auto(family), *place), run(oracle, long)


def unaltered(change: Any, family: str, kind: str) -> Iterator[Comparison]:
    """What is refused leaves the model as it was."""
    model, (inputs, expected) = made(family, kind), recorded(family, kind)
    try:
        yield change(model), "an error"
    finally:
        if not torch.allclose(run(model, inputs), expected, atol=2e-5, rtol=0):
            raise RuntimeError("the model was changed")


def batches() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(4, VOCABULARY, (8, LENGTH)), "attention_mask": torch.ones(8, LENGTH)}]


REFUSALS: dict[str, Any] = {
    "patch over it": lambda model: hf_posenc.patch(model, "alibi"),
    "patch over it, shaw": lambda model: hf_posenc.patch(model, "shaw"),
    "patch over it, relative_key": lambda model: hf_posenc.patch(model, "relative_key"),
    "unpatch": hf_posenc.unpatch,
    "convert to t5": lambda model: hf_posenc.convert(model, "t5", texts=batches()),
    "convert to relative": lambda model: hf_posenc.convert(model, "relative", texts=batches()),
    "extend by yarn": lambda model: hf_posenc.extend(model, LONG, "yarn"),
    "extend to less": lambda model: hf_posenc.extend(model, LENGTH - 1),
    "from_v4 of the model": hf_posenc.from_v4,
    "from_v4 again": lambda model: hf_posenc.from_v4(saved(model), type(model)),
}


def as_loaded(call: Any, family: str, kind: str) -> Iterator[Comparison]:
    """What would take a model that Transformers 5 loads without its vectors for one with positions."""
    yield call(stock_class(family).from_pretrained(old(family, kind)), kind), "an error"


LOST: dict[str, Any] = {
    "patch": hf_posenc.patch,
    "extend": lambda model, kind: hf_posenc.extend(model, LONG, "linear"),
    "extend by dynamic": lambda model, kind: hf_posenc.extend(model, LONG, "dynamic"),
    "convert": lambda model, kind: hf_posenc.convert(model, "t5", texts=batches()),
    "patch, from_v4": lambda model, kind: hf_posenc.from_v4(saved(hf_posenc.patch(model, "alibi")), type(model)),
}


def none_instead(family: str, kind: str) -> Iterator[Comparison]:
    """Patched with another encoding, as documented, and back: the body is the checkpoint's."""
    folder, (inputs, _) = old(family, kind), recorded(family, kind)
    model = stock_class(family).from_pretrained(folder)
    weights = {name: each for name, each in load_file(folder / "model.safetensors").items() if "position_emb" not in name}
    weights = {name: each * (TABLE not in name) for name, each in weights.items()}
    if family == "bert-generation":
        weights["bert.embeddings.position_embeddings.weight"] = torch.zeros(LENGTH, 8)
    patched = hf_posenc.patch(model, "none")
    yield run(patched, inputs), run(reference(stock_class(family), folder, weights), inputs)
    yield run(hf_posenc.unpatch(patched), inputs), run(model, inputs)


def trained(family: str, kind: str) -> Iterator[Comparison]:
    """Two steps as the reference takes them, with and without gradient checkpointing; saved and loaded."""
    folder, (inputs, _) = old(family, kind), recorded(family, kind)
    for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = made(family, kind)
        oracle = like(model, folder)
        if settings and model.supports_gradient_checkpointing:
            model.activation_checkpointing_enable(settings)
            model.train()
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
                if hasattr(module, "dropout") and isinstance(module.dropout, float):
                    module.dropout = 0.0
            if settings["use_reentrant"]:
                model.enable_input_require_grads()
        for each in (model, oracle):
            names = {name for name, _ in oracle.named_parameters() if "position_emb" not in name}
            optimizer = torch.optim.SGD([value for name, value in each.named_parameters() if name in names], lr=1e-3)
            with torch.enable_grad():
                for _ in range(2):
                    output = run(each, inputs)
                    optimizer.zero_grad()
                    (output * cotangent(output)).mean().backward()
                    optimizer.step()
        yield run(model.eval(), inputs), run(oracle, inputs)
    yield there(saved(model), inputs, auto(family)), run(oracle, inputs)


def with_adapters(family: str, kind: str) -> Iterator[Comparison]:
    """LoRA: a step, saved, put on the model made again and on the reloaded one, merged, saved and loaded."""
    folder, (inputs, expected) = old(family, kind), recorded(family, kind)
    targets = ["query", "value"]
    model = get_peft_model(made(family, kind), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    with torch.enable_grad():
        (run(model, inputs) ** 2).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    adapter, after = saved(model), run(model, inputs)
    yield bool((after - expected).abs().max() > 1e-3), True
    yield run(PeftModel.from_pretrained(made(family, kind), adapter).eval(), inputs), after
    again = auto(family).from_pretrained(saved(made(family, kind)))
    merged = PeftModel.from_pretrained(again, adapter).eval().merge_and_unload()
    yield run(merged, inputs), after, run(like(merged, folder, trained=True), inputs)
    yield run(like(merged, folder, trained=True), inputs), after
    for place in ((), ("bare",)):
        yield there(saved(merged), inputs, auto(family), *place), after


def headed(head: str, family: str, kind: str) -> Iterator[Comparison]:
    """Another head by from_v4, and by an Auto class on the saved model; saved and loaded, and in two choices."""
    cls = getattr(transformers, f"AutoModelFor{head}")
    if type(AutoConfig.from_pretrained(DATA / family)) not in cls._model_mapping or family in WITHOUT_TEXT:
        return
    inputs, _ = recorded(family, kind)
    labels = {} if head == "QuestionAnswering" else {"num_labels": 3}
    folder, inputs = old(family, kind, **labels), {name: each[:2] for name, each in inputs.items()}
    first = hf_posenc.from_v4(folder, cls)
    second = cls.from_pretrained(saved(made(family, kind)), **labels)
    if head == "MultipleChoice":
        inputs = {name: torch.stack([each, each.flip(0)], 1) for name, each in inputs.items()}
    for model in (first.eval(), second.eval()):
        expected = shown(like(model, folder), inputs)
        yield shown(model, inputs), expected
        body = {name: each for name, each in model.state_dict().items() if "posenc" in name}
        held = {name: each for name, each in first.state_dict().items() if "posenc" in name}
        yield all(torch.equal(body[name], held[name]) for name in {*body, *held}), True
        again = type(model).from_pretrained(saved(model)).eval()
        yield shown(again, inputs), expected


def shown(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The first output, zero where there is padding, at which it may be any."""
    output, mask = model(**inputs)[0], inputs["attention_mask"]
    per_token = output.shape[:2] == mask.shape and mask.ndim == 2
    return output * mask.view(*mask.shape, *[1] * (output.ndim - 2)) if per_token else output


def sides(family: str, kind: str) -> Iterator[Comparison]:
    """Texts padded on either side, as long as can be, against each by itself; attentions and states, too."""
    if family in WITHOUT_TEXT:
        return
    model = made(family, kind)
    model.set_attn_implementation("eager")
    oracle = like(model, old(family, kind))
    texts = [torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)) for length in (10, 7, 1)]
    for side in ("left", "right"):
        ids, mask = padded(texts, side, padding=0)
        outputs = model(input_ids=ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
        for row, text in enumerate(texts):
            one, kept = oracle(text[None], output_attentions=True, output_hidden_states=True), mask[row].bool()
            yield outputs[0][row][kept], one[0][0]
            yield len(outputs.attentions), len(one.attentions)
            for actual, expected in zip(outputs.attentions, one.attentions, strict=True):
                yield actual[row][:, kept][:, :, kept], expected[0]
            for actual, expected in zip(outputs.hidden_states, one.hidden_states, strict=True):
                yield actual[row][kept], expected[0]


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "prefill in chunks": {"prefill_chunk_size": 3},
}


PROMPTS = [torch.tensor([5, 9, 4, 7]), torch.tensor([8, 6])]


def beside(family: str, kind: str) -> dict[str, Tensor]:
    return {name: each[:2] for name, each in recorded(family, kind)[0].items() if name == "encoder_hidden_states"}


def answer(model: Any, mode: str, beyond: bool, more: dict[str, Tensor]) -> Any:
    ids, mask = padded(PROMPTS, "left", padding=0)
    settings = {"do_sample": False, "max_new_tokens": 15 if beyond else 5, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(
        ids, attention_mask=mask, output_logits=True, output_scores=True, return_dict_in_generate=True, length_penalty=0.0,
        **{**settings, **MODES[mode]}, **more,
    )  # fmt: skip


def plain(mode: str, beyond: bool, family: str, kind: str) -> Any:
    """The same call of a stock model."""
    folder = old(family, kind, is_decoder=True)
    answer(AutoModelForCausalLM.from_pretrained(folder), mode, False, beside(family, kind))


def generated(mode: str, beyond: bool, family: str, kind: str) -> Iterator[Comparison]:
    """As a decoder, on left-padded prompts, against one forward pass of the reference over each row."""
    if family in NO_DECODER or (beyond and family == "bert-generation"):
        return
    folder = old(family, kind, is_decoder=True)
    model = hf_posenc.from_v4(folder, AutoModelForCausalLM, max_length=LONG if beyond else None).eval()
    model = AutoModelForCausalLM.from_pretrained(saved(model))
    oracle, more = like(model, folder), beside(family, kind)
    out = answer(model, mode, beyond, more)
    for row, prompt in enumerate(PROMPTS):
        new = out.sequences[row, len(PROMPTS[0]) :]
        states = {name: each[row : row + 1] for name, each in more.items()}
        logits = oracle(torch.cat([prompt, new])[None], use_cache=False, **states).logits[0][len(prompt) - 1 : -1]
        if mode == "beams":
            yield out.sequences_scores[row], logits.log_softmax(-1).gather(1, new[:, None]).sum()
        else:
            yield torch.stack(out.logits)[:, row], logits


def resized(family: str, kind: str) -> Iterator[Comparison]:
    """More words, then saved and loaded."""
    if family == "esm":  # its head keeps a bias of the old size, stock too
        return
    model, folder, (inputs, _) = made(family, kind), old(family, kind, vocab_size=VOCABULARY + 3), recorded(family, kind)
    model.resize_token_embeddings(VOCABULARY + 3)
    expected = run(like(model, folder), inputs)
    yield run(model, inputs), expected
    yield there(saved(model), inputs, auto(family)), expected


def from_the_bare(family: str, kind: str) -> Iterator[Comparison]:
    """A checkpoint of the model without its head, and the model without its head of a checkpoint that has one."""
    folder, (inputs, _) = old(family, kind), recorded(family, kind)
    weights, prefix = load_file(folder / "model.safetensors"), f"{stock_class(family).base_model_prefix}."
    expected = shown(reference(stock_class(family), folder, weights).base_model, inputs)
    yield shown(hf_posenc.from_v4(folder, AutoModel).base_model, inputs), expected
    if any(name.startswith(prefix) for name in weights):
        bare = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
        for cls in (AutoModel, stock_class(family)):
            yield shown(hf_posenc.from_v4(folder, cls).base_model, inputs), expected


def tokenizer(folder: Path) -> None:
    """Words w4 to w11, by the names of whatever tokenizer."""
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, **{f"w{number}": number for number in range(4, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=LENGTH, **names)
    made.save_pretrained(folder)


TEXTS = ["w4 w9 w5 w5 w11 w8", "w7 w6"]


def command(*arguments: Any) -> None:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    if done.exit_code and UNSERVED in done.output:
        raise Refused(done.output.strip())
    if done.exit_code:
        raise done.exception if not isinstance(done.exception, SystemExit) and done.exception else RuntimeError(done.output)


def commanded(family: str, kind: str) -> Iterator[Comparison]:
    """patch, inspect and extend on the command line, with a tokenizer."""
    folder, (inputs, expected) = old(family, kind), recorded(family, kind)
    tokenizer(folder)
    new = Path(new_folder())
    command("patch", folder, kind, "--output-dir", new / "new")
    yield there(new / "new", inputs, auto(family)), expected
    yield there(new / "new", inputs, auto(family), "bare"), expected
    command("inspect", new / "new")
    if family != "bert-generation":
        command("extend", new / "new", "--max-length", LONG, "--output-dir", new / "long")
        yield there(new / "long", inputs, auto(family)), expected


def sentences(inner: str, family: str, kind: str) -> Iterator[Comparison]:
    """A directory of sentence-transformers, its model at the root or, as old ones have it, in a folder."""
    if family in WITHOUT_TEXT or family == "bert-generation":
        return
    folder = Path(new_folder()) / "sentences"
    shutil.copytree(old(family, kind), folder / inner)
    tokenizer(folder / inner)
    (folder / inner / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LENGTH, "do_lower_case": False}))
    stages = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate({inner: "Transformer", "1_Pooling": "Pooling"}.items())
    ]
    (folder / "modules.json").write_text(json.dumps(stages))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": read(folder / inner)["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    oracle = reference(stock_class(family), folder / inner, load_file(folder / inner / "model.safetensors")).base_model

    def mean(text: str) -> Tensor:
        return oracle(torch.tensor([[int(word[1:]) for word in text.split()]]))[0][0].mean(0)

    out = Path(new_folder()) / "new"
    command("patch", folder, kind, "--output-dir", out)
    model = SentenceTransformer(str(out), device="cpu")
    for text, vector in zip(TEXTS, model.encode(TEXTS, convert_to_tensor=True), strict=True):
        yield vector, mean(text)
    far = " ".join(TEXTS * 3)
    longer = hf_posenc.extend(model, LONG)
    longer.save(str(out.parent / "long"))
    for each in (longer, SentenceTransformer(str(out.parent / "long"), device="cpu")):
        yield each.encode([far, TEXTS[1]], convert_to_tensor=True)[0], mean(far)
    yield refusal(lambda: hf_posenc.patch(SentenceTransformer(str(folder), device="cpu"), kind)), "from_v4"


def refusal(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return "from_v4" if "from_v4" in str(error) else str(error)
    return ""


def no_v4(family: str, kind: str) -> Iterator[Comparison]:
    yield hf_posenc.from_v4(old(family, "absolute"), stock_class(family)), "an error"


def cases(settings: Settings) -> Iterator[Case]:
    attacks: dict[str, Any] = {
        "as it is": alone,
        "saved and loaded": reloaded,
        "by the Hub": by_the_hub,
        "pickles beside": with_pickles,
        "only pickles": only_pickles,
        "shards, old names": in_shards,
        "half precision": in_half,
        "too long": beyond,
        "longer": for_longer,
        "patched otherwise": none_instead,
        "trained": trained,
        "LoRA": with_adapters,
        "padding, attentions": sides,
        "more words": resized,
        "bare model": from_the_bare,
        "command line": commanded,
        "absolute positions": no_v4,
        **{f"refused: {name}": functools.partial(unaltered, call) for name, call in REFUSALS.items()},
        **{f"as Transformers 5 loads it: {name}": functools.partial(as_loaded, call) for name, call in LOST.items()},
        **{f"head: {head}": functools.partial(headed, head) for head in HEADS},
        **{f"generate: {mode}": functools.partial(generated, mode, False) for mode in MODES},
        **{f"generate longer: {mode}": functools.partial(generated, mode, True) for mode in MODES},
        "sentence-transformers": functools.partial(sentences, ""),
        "sentence-transformers, in a folder": functools.partial(sentences, "0_Transformer"),
    }
    for attack, function in attacks.items():
        for family in FAMILIES:
            for kind in KINDS:
                given: Any = (*getattr(function, "args", ()), family, kind)
                stock = functools.partial(plain, *given) if attack.startswith("generate") else None
                yield Case(attack, family, kind, no_grad(function, family, kind), stock, limit=180)
