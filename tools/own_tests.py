"""Run Transformers' own model tests on patched classes.

    git clone --depth 1 --branch v5.16.0 https://github.com/huggingface/transformers CHECKOUT
    python -m tools.own_tests CHECKOUT --output_file scripts/results/own_tests.txt
    python -m tools.own_tests CHECKOUT --families bert,llama --encodings rope

No release of Transformers contains its tests, so they come from a clone, and run with its code. In the tests of a family,
all of its model and config classes are replaced by derived classes with an encoding. Tests that fail are repeated with the
original classes. The table shows how many fail only with an encoding.

The tests need the packages parameterized and timeout-decorator. They run without network access, so tests that download models
are skipped. Results are stored by family, encoding, and hash of the code, so an interrupted run resumes. A family takes about a
minute.
"""

import argparse
import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

from hf_posenc.evaluation import records, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text
from tools.check_support import state_of_the_code

ROOT = Path(__file__).resolve().parent.parent
ENCODING, FAMILY = "HF_POSENC_TESTED_ENCODING", "HF_POSENC_TESTED_FAMILY"
"""Environment variables of the test process. pytest loads this module as a plugin there."""
UNSUPPORTED = "UnsupportedModelError: "
ENCODINGS = ("rope", "alibi", "shaw", "sinusoidal")
FAMILIES = {
    "encoders": "albert bert deberta_v2 distilbert electra ernie esm megatron_bert modernbert mpnet nomic_bert "
    "rembert roberta roformer mobilebert",
    "decoders": "bloom falcon gemma gpt2 gpt_neox gptj granite llama mistral mixtral mpt olmo2 opt phi3 qwen2 qwen3 stablelm",
    "encoder-decoders": "bart blenderbot m2m_100 marian mbart pegasus t5 umt5",
    "images": "beit deit dinov2 swin vit",
    "audio": "audio_spectrogram_transformer hubert wav2vec2 whisper",
}
"""Kind -> modeling directories that are tested by default."""
EXPLAINED = {
    "test_config": "Saving a config also builds its model without weights. No model has the sizes of this test's config.",
    "test_inherits_generation_mixin": "It looks at direct base classes only. Derived classes inherit the mixin indirectly.",
    "resize_position_vector_embeddings": "It resizes the position embeddings that the encoding replaces.",
    "sinusoidal": "It tests the position embeddings that the encoding replaces.",
    "keys_to_ignore_on_save": "It names position embeddings that the encoding replaces.",
    "test_model_rope_scaling": "It tests the rotation that the encoding replaces.",
    "reload_no_missing_tied_weights": "It loads a file without weights. Missing weights of an encoding are an error.",
    "standalone": "It loads the saved encoder or decoder with an internal class of the original, without an encoding.",
    "test_training": "It recognizes heads without labels or loss by the names of the original classes.",
    "SwinModelTest": "It recognizes SwinBackbone by the name of the original class.",
    "position_ids starts at 0": "It passes position IDs from 0, which are an error, because RoBERTa counts from 2.",
}
"""Part of a test's name or error -> why it fails with an encoding only."""


@dataclass(frozen=True)
class Result:
    """The result of a family's tests with an encoding.

    passed, skipped: numbers of tests. failed: test -> the last line of its error, without those that also fail with the
    original classes, of which `also_original` is the number. unsupported: why no test passed.
    """

    family: str
    encoding: str
    passed: int = 0
    skipped: int = 0
    also_original: int = 0
    failed: dict[str, str] | None = None
    unsupported: str = ""


def pytest_configure(config: Any) -> None:
    """Replace the classes of a family in Transformers' namespace, from which its tests import them."""
    if ENCODING in os.environ:
        derive(os.environ[FAMILY], os.environ[ENCODING])


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Complete testers of decoders, which infer the other classes from the base model's name and module."""
    for module in {item.module for item in items} if ENCODING in os.environ else ():
        for tester in (each for each in vars(module).values() if isinstance(each, type)):
            # Classes whose library is missing raise errors for other attributes.
            base = next((vars(cls)["base_model_class"] for cls in tester.__mro__ if "base_model_class" in vars(cls)), None)
            if base is not None and hasattr(base, "original_class"):
                endings = sys.modules["tests.causal_lm_tester"]._COMMON_MODEL_NAMES_MAP
                _complete(tester, base.original_class.__name__.removesuffix("Model"), endings)


def _complete(tester: Any, name: str, endings: dict[str, str]) -> None:
    transformers = sys.modules["transformers"]
    for attribute, ending in endings.items():
        if getattr(tester, attribute, None) is None and hasattr(transformers, name + ending):
            setattr(tester, attribute, getattr(transformers, name + ending))


def derive(family: str, encoding: str) -> None:
    """Replace a family's classes. Those whose model doesn't support the encoding stay. Raises ValueError if all do."""
    import transformers

    import hf_posenc

    replaced, why = dict[str, Any](), ""
    for file in sorted((Path(transformers.__file__).parent / "models" / family).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{file.stem}")
        for name in getattr(module, "__all__", ()):
            kind = getattr(module, name)
            if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)) or name.endswith(
                "PreTrainedModel"
            ):
                continue
            try:
                replaced[name] = getattr(hf_posenc, f"PosEnc{name}")
            except (AttributeError, ValueError) as error:
                why = why or str(error)
    if not replaced:
        raise ValueError(f"{family}: no class can be derived. {why}")
    for kind in {each.config_class for each in replaced.values()}:
        _with_default(kind, encoding)
        replaced[kind.__name__.removeprefix("PosEnc")] = kind

    def lookup(self: Any, name: str) -> Any:
        return replaced[name] if name in replaced else ModuleType.__getattribute__(self, name)

    # Transformers creates its main module several times, so that attributes of one of them would be lost.
    type.__setattr__(type(transformers), "__getattribute__", lookup)


def _with_default(kind: Any, encoding: str) -> None:
    """Give a config class an encoding by default."""
    original = kind.__init__

    @functools.wraps(original)  # Testers read its signature.
    def init(self: Any, *args: Any, **options: Any) -> None:
        options.setdefault("position_encoding", encoding)
        original(self, *args, **options)

    kind.__init__ = init


def outcomes(checkout: Path, family: str, encoding: str | None, only: list[str], seconds: int) -> dict[str, str]:
    """Test -> "", "skipped", or the last line of its error. encoding: None for the original classes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", f"tests/models/{family}/test_modeling_{family}.py", "-q", "--timeout", "600"]
        command += ["-p", "no:cacheprovider", "-p", "tools.own_tests", "--junitxml", str(report), "-k", "ModelTest"]
        paths = [str(ROOT), str(checkout / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if encoding:
            environment |= {ENCODING: encoding, FAMILY: family}
        if only:
            command[command.index("ModelTest")] = " or ".join(only)
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds)
        if not report.exists():
            raise ValueError((done.stdout + done.stderr).strip().splitlines()[-1])
        return {f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": _outcome(case) for case in _cases(report)}


def _cases(report: Path) -> Iterator[ElementTree.Element]:
    return ElementTree.parse(report).iter("testcase")


def _outcome(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    failed = next((each for kind in ("failure", "error") if (each := case.find(kind)) is not None), None)
    return "" if failed is None else (failed.get("message") or "failed").splitlines()[0][:200]


def tested(checkout: Path, family: str, encoding: str, seconds: int) -> Result:
    """Run a family's tests with an encoding, and those that fail with the original classes."""
    try:
        found = outcomes(checkout, family, encoding, [], seconds)
    except (ValueError, subprocess.TimeoutExpired) as error:
        return Result(family, encoding, unsupported=str(error)[:300])
    failed = {name: why for name, why in found.items() if why not in ("", "skipped")}
    refused = [why for why in failed.values() if UNSUPPORTED in why]
    if 2 * len(refused) > len(failed) > 1:  # of the config of these tests
        return Result(
            family, encoding, unsupported=Counter(why.partition(UNSUPPORTED)[2] for why in refused).most_common(1)[0][0]
        )
    if "" not in found.values():  # such as tests that can't be imported
        return Result(family, encoding, unsupported=next(iter(failed.values()), "no test ran"))
    original = {}
    if failed:
        original = outcomes(checkout, family, None, [name.partition(".")[2].partition("[")[0] for name in failed], seconds)
    own = {name: why for name, why in failed.items() if original.get(name, "") in ("", "skipped")}
    values = [*found.values()]
    return Result(family, encoding, values.count(""), values.count("skipped"), len(failed) - len(own), own)


def table(results: list[Result]) -> str:
    """A line for each family and encoding, and the tests that fail with the encoding only."""
    passed = sum(each.passed for each in results)
    failed = [(each, name, why) for each in results for name, why in (each.failed or {}).items()]
    families = {each.family for each in results if not each.unsupported}
    by_reason = dict[str, list[str]]()
    for each, name, why in failed:
        reason = next((reason for part, reason in EXPLAINED.items() if part in name + why), f"Not explained: {why}")
        by_reason.setdefault(reason, []).append(f"    {each.family}, {each.encoding}: {name.replace('.', ' ')}")
    explained = sum(len(tests) for reason, tests in by_reason.items() if reason in EXPLAINED.values())
    counts = f"{passed:,} tests pass, {len(failed)} fail with an encoding only, {explained} explained"
    lines = [f"{len(families)} families: {counts}", ""]
    lines.append(f"{'family':32}{'encoding':14}{'passed':>8}{'skipped':>9}{'fail in both':>14}{'fail only here':>16}")
    for each in results:
        shown = f"{each.family:32}{each.encoding:14}"
        counts = f"{each.passed:8}{each.skipped:9}{each.also_original:14}{len(each.failed or {}):16}"
        lines.append(shown + (f"  {each.unsupported}" if each.unsupported else counts))
    for reason, tests in sorted(by_reason.items()):
        lines += ["", reason, *tests]
    return "\n".join(lines) + "\n"


def _has(file: Path, state: str) -> bool:
    return file.exists() and state in records.read(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="directory of a clone of Transformers")
    parser.add_argument("--families", help="comma-separated modeling directories (default: a sample of all kinds)")
    parser.add_argument(
        "--encodings", help=f"comma-separated encodings (default: one of {', '.join(ENCODINGS)} for each family)"
    )
    parser.add_argument("--limit", type=int, default=900, help="seconds for a family's tests (default: %(default)s)")
    parser.add_argument("--output_file", type=Path, help="file for the table, which is also printed")
    kept = ROOT / "build" / "own_tests.json"
    parser.add_argument("--results_file", type=Path, default=kept, help="file of stored results (default: %(default)s)")
    args = parser.parse_args()
    families = args.families.split(",") if args.families else [name for names in FAMILIES.values() for name in names.split()]
    for family in families:
        if not (args.checkout / "tests" / "models" / family / f"test_modeling_{family}.py").exists():
            parser.error(
                f"{args.checkout} has no tests of {family}. Pass a clone of Transformers, and its modeling directories."
            )
    given = args.encodings.split(",") if args.encodings else None
    wanted = [(name, each) for place, name in enumerate(families) for each in given or [ENCODINGS[place % len(ENCODINGS)]]]
    state, done = state_of_the_code(), dict[tuple[str, str], Result]()
    args.results_file.parent.mkdir(parents=True, exist_ok=True)
    for row in records.read(args.results_file)[state] if _has(args.results_file, state) else ():
        done[row["family"], row["encoding"]] = Result(**row)
    missing = [each for each in wanted if each not in done]
    for family, encoding in ProgressBar(missing, desc="families"):
        done[family, encoding] = tested(args.checkout.resolve(), family, encoding, args.limit)
        records.write(args.results_file, {state: [asdict(each) for each in done.values()]})
    page = table([done[each] for each in wanted])
    print(page, end="")
    if args.output_file:
        write_text(args.output_file, page)


if __name__ == "__main__":
    terminals.set_up()
    main()
