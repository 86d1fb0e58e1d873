"""Print how much code is saved with a checkpoint, by package: `python tools/carried_code.py`."""

import ast
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import transformers

import hf_posenc
from hf_posenc.evaluation import terminals

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
BART = {
    "d_model": 32,
    **{f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")},
}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BERT + alibi": ("BertModel", SIZES, "alibi"),
    "Llama + rope": ("LlamaModel", SIZES, "rope"),
    "BART + t5": ("BartModel", BART, "t5"),
    "ViT + rope_2d": ("ViTModel", SIZES, "rope_2d"),
}


def carried(model: Any) -> dict[str, str]:
    """File name -> source of the code that is saved with a model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).glob("*.py")}


def statements(source: str) -> int:
    """The number of lines without blank lines, comments, and docstrings."""
    nodes: list[Any] = [node for node in ast.walk(ast.parse(source)) if _is_text(node)]
    texts = {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(number not in texts and bool(line.strip()) and not line.lstrip().startswith("#") for number, line in lines)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    print(f"{'':14}{'files':>7}{'lines':>8}{'of code':>9}{'kB':>6}   lines by package")
    for name, (cls, sizes, encoding) in MODELS.items():
        kind = getattr(transformers, cls)
        code = carried(hf_posenc.patch(kind(kind.config_class(**sizes)), encoding))
        lines: Counter[str] = Counter()
        for file, source in code.items():
            _, _, path = file.removesuffix(".py").partition("_")
            lines[path.partition("_")[0]] += source.count("\n")
        size = sum(len(source.encode()) for source in code.values()) / 1000
        packages = ", ".join(f"{package} {count}" for package, count in lines.most_common())
        counts = f"{len(code):>7}{sum(lines.values()):>8,}{sum(map(statements, code.values())):>9,}{size:>6.0f}"
        print(f"{name:14}{counts}   {packages}")


if __name__ == "__main__":
    terminals.set_up()
    main()
