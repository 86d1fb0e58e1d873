"""Measure with mutation testing how many small faults in the core the tests detect.

    python -m tools.mutate --mutants 200 --seed 0 --processes 2 --output_file scripts/results/mutants.txt

A mutant is the source with one line changed inside a function body. The tool first samples a line, uniformly from all lines to
which an operator applies, and then one of the line's edits. The mutants depend only on the seed and the source, so that two
test suites can be compared on the same mutants. To measure another checkout, copy this file into its tools/ and run it there:

    git worktree add /tmp/base a9e84f8b && cp tools/mutate.py /tmp/base/tools/ && cd /tmp/base
    python -m tools.mutate --packages hf_posenc/architectures --mutants 50

The first run records with pytest-cov which tests reach which line, also in processes that `tests/launcher.py` starts. A mutant
is killed if one of these tests fails, or if they take more than three times the recorded time plus a minute. A test that also
fails without the mutant is ignored. Verdicts are stored in `build/mutants` by a hash of source and tests. An interrupted run
resumes, and a run with more `--seconds` repeats only survivors with tests that did not run.

mutmut 3 keeps all variants of a function in its module and selects one with a trampoline. This changes the source files that
hf-posenc copies into checkpoints. It also has no seeded sample. cosmic-ray runs one command for every mutant, without selecting
tests by coverage.
"""

import argparse
import ast
import bisect
import contextlib
import functools
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PACKAGES = tuple(f"hf_posenc/{name}" for name in ("encodings", "attention", "modeling", "serialization"))
KEPT = Path("build/mutants")
FIRST = 30
"""Number of tests in the first stage. The other tests are collected only if these pass."""
LEFT_OUT = (".git", ".venv", ".*_cache", "__pycache__", "build", "demo_output", "site")
"""Patterns of files that a worker doesn't copy."""
SWAPPED = [("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in"), ("and", "or"), ("+", "-"), ("*", "/")]
SWAPS = {old: new for pair in SWAPPED for old, new in (pair, pair[::-1])}
SIGNS: dict[type[ast.AST], str] = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"},
    **{ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or"},
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"},
}
REMOVED = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Raise, ast.Delete, ast.Break, ast.Continue)
"""Statements to remove. Assertions are excluded, because they only tell type checkers what holds for every input."""


@dataclass(frozen=True)
class Mutant:
    """A replacement of the bytes `begin` to `end` of a file with `text`.

    statement: the first line of the statement that contains the bytes.
    """

    path: str
    line: int
    statement: int
    operator: str
    begin: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """The changed source, in which all lines keep their numbers."""
        lost = source[self.begin : self.end].count(b"\n") - self.text.count("\n")
        return source[: self.begin] + self.text.encode() + b"\n" * lost + source[self.end :]


class Edits(ast.NodeVisitor):
    """All mutants of a file, without those of docstrings, decorators, default values, annotations, and f-strings."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.found, self.inside, self.statement = path, source, list[Mutant](), False, 0
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        if self.inside:
            self.mutate(node)
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, self.inside = self.inside, True
        for each in node.body[ast.get_docstring(node) is not None :]:
            self.visit(each)
        self.inside = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def mutate(self, node: ast.AST) -> None:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test]):
                begin, end = self.span(test)
                self.add("condition", begin, end, f"not ({self.source[begin:end].decode()})")
            case ast.Compare(left=left, ops=signs, comparators=others):
                for sign, one, other in zip(signs, [left, *others], others, strict=False):
                    self.swap("comparison", sign, one, other)
            case ast.BoolOp(op=sign, values=values):
                for one, other in zip(values, values[1:], strict=False):
                    self.swap("and/or", sign, one, other)
            case ast.BinOp(left=one, op=sign, right=other):
                self.swap("arithmetic", sign, one, other)
            case ast.AugAssign(target=one, op=sign, value=other):
                self.swap("arithmetic", sign, one, other, "=")
            case ast.Constant(value=bool(value)):
                self.add("constant", *self.span(node), str(not value))
            case ast.Constant(value=int(value)):
                self.add("constant", *self.span(node), str(value + 1))
                self.add("constant", *self.span(node), str(value - 1))
            case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
                self.add("return None", *self.span(value), "None")
        if isinstance(node, REMOVED) and not (isinstance(node, ast.AnnAssign) and node.value is None):
            self.add("remove", *self.span(node), "pass")

    def span(self, node: Any) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def swap(self, operator: str, sign: ast.AST, one: ast.expr, other: ast.expr, after: str = "") -> None:
        """Add a mutant that swaps the operator between two expressions, if there are only parentheses besides it."""
        if not (old := SIGNS.get(type(sign))):
            return
        begin, end = self.span(one)[1], self.span(other)[0]
        if found := re.fullmatch(rf"[\s()\\]*({re.escape(old)}){re.escape(after)}[\s()\\]*", self.source[begin:end].decode()):
            self.add(operator, begin + found.start(1), begin + found.end(1), SWAPS[old])

    def add(self, operator: str, begin: int, end: int, text: str) -> None:
        line = bisect.bisect(self.starts, begin)
        self.found.append(Mutant(self.path, line, self.statement, operator, begin, end, text))


def compiles(mutant: Mutant, source: bytes) -> bool:
    """Whether the mutant is valid code that differs from the source."""
    try:
        changed = ast.dump(ast.parse(mutant.apply(source)))
        compile(mutant.apply(source), mutant.path, "exec")
    except SyntaxError:
        return False
    return changed != ast.dump(ast.parse(source))


def draw(root: Path, packages: Iterable[str], count: int, seed: int) -> tuple[list[Mutant], int]:
    """The first mutants of a seed, and the number of lines that they are sampled from.

    Lines are ordered by hash, so that a change of the source doesn't affect the mutants of other lines.
    """
    paths = sorted(path.relative_to(root).as_posix() for each in packages for path in (root / each).rglob("*.py"))
    sources = {path: (root / path).read_bytes() for path in paths}
    lines, seen = defaultdict(list), Counter[str]()
    for path, source in sources.items():
        by_number = defaultdict(list)
        for each in Edits(path, source).found:
            by_number[each.line].append(each)
        texts = source.decode().splitlines()
        for number in sorted(by_number):
            name = f"{seed} {path} {texts[number - 1].strip()}"
            seen[name] += 1
            lines[hashlib.sha256(f"{name} {seen[name]}".encode()).hexdigest()] = by_number[number]
    drawn = list[Mutant]()
    for order, edits in sorted(lines.items()):
        if len(drawn) < count:
            edits = random.Random(order).sample(edits, len(edits))
            drawn += [each for each in edits if compiles(each, sources[each.path])][:1]
    return drawn, len(lines)


def changed_line(root: Path, mutant: Mutant) -> str:
    source = (root / mutant.path).read_bytes()
    before, after = (text.splitlines()[mutant.line - 1].decode().strip() for text in (source, mutant.apply(source)))
    return f"{before}  →  {after}"


def state_of(root: Path, packages: Iterable[str]) -> str:
    """A hash of the source and the tests that verdicts depend on."""
    digest = hashlib.sha256()
    for top in sorted({each.partition("/")[0] for each in packages} | {"tests"}):
        for path in sorted((root / top).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def record(root: Path, packages: Iterable[str], folder: Path, processes: int) -> None:
    """Run the test suite, and record which tests reach which line and how long each takes, for all directories of the packages.

    `state_of` doesn't tell these directories apart, so that a run on others reuses the recording.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", "-n", str(processes)]
    command += ["--dist", "loadfile", "--no-loadscope-reorder", "--cov-context=test"]
    command += [f"--cov={top}" for top in sorted({each.partition("/")[0] for each in packages})]
    command += [f"--cov-config={os.devnull}", "--cov-report=", "--junitxml", str(folder / "unfinished.xml")]
    subprocess.run(command, cwd=root, env={**os.environ, "COVERAGE_FILE": str(folder / "coverage")}, check=False)
    (folder / "unfinished.xml").rename(folder / "tests.xml")


class Recording:
    """Which tests reach which line.

    seconds: the time of each test that was not skipped. It includes tests that failed, because some fail only under coverage.
        If such a test kills a mutant, it is run again without the mutant.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        from coverage import CoverageData

        self.root, self.data = root, CoverageData(str(folder / "coverage"))
        self.data.read()
        self.seconds: dict[str, float] = {}
        for case in ElementTree.parse(folder / "tests.xml").iter("testcase"):
            if case.find("skipped") is None:
                self.seconds[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = float(
                    case.get("time", 0)
                )

    @functools.cache  # noqa: B019
    def lines(self, path: str) -> dict[int, list[str]]:
        return self.data.contexts_by_lineno(str(self.root / path))

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that reach a mutant, in the order to run them.

        A line that runs in a fixture concerns all tests of the file, and a line that runs at import all tests. These come last.
        """
        lines = self.lines(mutant.path)
        near, files, everywhere = set(), set(), False
        for context in lines.get(mutant.line) or lines.get(mutant.statement, []):
            test, _, phase = context.rpartition("|")
            near.add(test)
            if phase != "run":
                files.add(test.partition("::")[0])
            everywhere |= not test
        beyond = {test for test in self.seconds if everywhere or test.partition("::")[0] in files} - near
        return [*self.in_order(near & self.seconds.keys()), *self.in_order(beyond)]

    def in_order(self, tests: Iterable[str]) -> list[str]:
        """One case of each test function, then the other cases, each in the order of their time."""
        seen, first, others = set[str](), list[str](), list[str]()
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            (others if test.partition("[")[0] in seen else first).append(test)
            seen.add(test.partition("[")[0])
        return first + others

    def within(self, tests: list[str], seconds: float) -> list[str]:
        """The first tests that fit into this time together, but at least one."""
        total, chosen = 0.0, list[str]()
        for test in tests:
            total += self.seconds[test]
            if chosen and total > seconds:
                break
            chosen.append(test)
        return chosen


class Worker:
    """Runs tests on mutants in a copy of the checkout, in forks of a process that has already imported other libraries."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, Path(tempfile.mkdtemp(dir=folder))
        self.copy, self.modules, self.passing, self.count = self.folder / "copy", self.folder / "modules", dict[str, bool](), 0
        shutil.copytree(root, self.copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self.ours = {path.stem for place in (root, root / "scripts", root / "tests") for path in place.glob("*.py")}
        self.ours |= {path.parent.name for place in (root, root / "tests") for path in place.glob("*/__init__.py")}
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        os.environ["HF_MODULES_CACHE"] = str(self.modules)
        for name in ("PYTHONDONTWRITEBYTECODE", "COVERAGE_FILE"):
            os.environ.pop(name, None)
        sys.dont_write_bytecode = False
        importlib.import_module("pytest")
        for path in sorted(self.copy.rglob("*.py")):
            if "tests" in path.parts or path.relative_to(self.copy).parts[0] in self.ours:
                self.warm_up(ast.parse(path.read_bytes()).body)
        gc.freeze()

    def warm_up(self, statements: Iterable[ast.stmt]) -> None:
        """Import other libraries as these statements do."""
        for node in statements:
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = names if isinstance(node, ast.Import) else [getattr(node, "module", None) or "."]
            for module in modules:
                if names and not module.startswith(".") and module.partition(".")[0] not in self.ours:
                    with contextlib.suppress(ImportError, AttributeError):
                        found = importlib.import_module(module)
                        _ = [getattr(found, name) for name in names if isinstance(node, ast.ImportFrom)]

    def judge(self, mutant: Mutant, stages: list[list[str]], limit: float) -> dict[str, Any]:
        """Run tests on a mutant, and return the verdict."""
        path, since, left_out = self.copy / mutant.path, time.monotonic(), list[str]()
        source, status = path.read_bytes(), path.stat()
        while True:
            path.write_bytes(mutant.apply(source))
            self.count += 1
            os.utime(path, (self.count, self.count))  # Otherwise, Python could use the bytecode of another mutant.
            verdict, test = "survived", ""
            for stage in stages:
                if verdict == "survived":
                    verdict, test = self.run([each for each in stage if each not in left_out], limit)
            path.write_bytes(source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            if verdict != "killed" or self.passes(test or stages[0][0], limit):
                seconds = round(time.monotonic() - since, 1)
                return {"verdict": verdict, "test": test, "left_out": left_out, "seconds": seconds}
            if test in ("", *left_out):
                raise RuntimeError(f"{test or stages[0][0]} can't be run:\n{(self.folder / 'output.txt').read_text()}")
            left_out.append(test)

    def passes(self, test: str, limit: float) -> bool:
        """Whether a test passes without a mutant."""
        if test not in self.passing:
            self.passing[test] = self.run([test], limit)[0] == "survived"
        return self.passing[test]

    def run(self, tests: list[str], limit: float) -> tuple[str, str]:
        """Run tests. Returns "survived", "killed", or "timeout", and the first test that failed."""
        if not tests:
            return "survived", ""
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        failed = self.folder / "failed.txt"
        failed.write_text("")
        shutil.rmtree(self.modules, ignore_errors=True)
        if not (child := os.fork()):
            try:
                self.pytest(sorted(tests, key=lambda test: files.index(test.partition("::")[0])), failed)
            except BaseException:
                traceback.print_exc()
                os._exit(3)
        end, (done, status) = time.monotonic() + limit, (0, 0)
        while not done and time.monotonic() < end:
            time.sleep(0.05)
            done, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not done:
            os.waitpid(child, 0)
            return "timeout", ""
        return ("killed", failed.read_text()) if status else ("survived", "")

    def pytest(self, tests: list[str], failed: Path) -> None:
        """Run tests in the forked process, and end the process."""
        os.setsid()
        os.chdir(self.copy)
        with (self.folder / "output.txt").open("w") as output, open(os.devnull) as nothing:
            for ours, theirs in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(ours.fileno(), theirs)
        places = [str(self.copy / place) for place in (".", "tests", "scripts")]
        others = [
            place for place in sys.path if Path(place).resolve() not in [self.root / each for each in (".", "tests", "scripts")]
        ]
        sys.path[:], os.environ["PYTHONPATH"] = [*places, *others], os.pathsep.join(places)
        sys.modules["__main__"] = types.ModuleType("__main__")
        for name in [name for name in sys.modules if name.partition(".")[0] in self.ours]:
            del sys.modules[name]
        pytest = importlib.import_module("pytest")

        class Plugin:
            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed and not failed.read_text():
                    failed.write_text(report.nodeid)

        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "--basetemp",
            str(self.folder / "temporary"),
        ]
        code = pytest.main([*options, *tests], plugins=[Plugin()])
        sys.stdout.flush()
        os._exit(code)


WORKER: list[Worker] = []
"""The worker of this process."""


def begin(root: Path, folder: Path) -> None:
    WORKER.append(Worker(root, folder))


def judge(*arguments: Any) -> dict[str, Any]:
    return WORKER[0].judge(*arguments)


def report(rows: list[dict[str, Any]], title: str) -> str:
    """The report as text."""
    lines = [
        title,
        "",
        f"{'package':28}{'mutants':>9}{'killed':>9}{'timeout':>9}{'survived':>10}{'not reached':>13}{'% killed':>10}",
    ]
    packages = sorted({str(Path(row["path"]).parent) for row in rows})
    for package in [*packages, "all"]:
        of = [row for row in rows if package in ("all", str(Path(row["path"]).parent))]
        killed, late, left = (sum(row["verdict"] == each for row in of) for each in ("killed", "timeout", "survived"))
        unreached = sum(not row["tests"] for row in of)
        counts = f"{len(of):9}{killed:9}{late:9}{left:10}{unreached:13}"
        lines.append(f"{package:28}{counts}{100 * (killed + late) / len(of):10.1f}")
    survivors = sorted((row for row in rows if row["verdict"] == "survived"), key=lambda row: (row["path"], row["line"]))
    whole = sum(row["ran"] == row["tests"] for row in survivors)
    lines += ["", f"survivors, of which {whole} had all their tests run:", ""]
    for row in survivors:
        ran = f"{row['ran']} of {row['tests']} tests" if row["tests"] else "not reached"
        lines.append(f"{row['path']}:{row['line']}  {row['operator']}  ({ran})\n    {row['change']}")
    return "\n".join(lines) + "\n"


def measure(root: Path, packages: list[str], count: int, seed: int, processes: int, seconds: float) -> str:
    """Record coverage if necessary, test all mutants without a verdict, and return the report."""
    from hf_posenc.progress import ProgressBar  # Workers import this module, and their forks must import hf_posenc themselves.

    mutants, lines = draw(root, packages, count, seed)
    state = state_of(root, packages)
    folder, results = root / KEPT / f"recording-{state}", root / KEPT / "results.jsonl"
    if not (folder / "tests.xml").exists():
        record(root, packages, folder, processes)
    recording, kept = Recording(root, folder), dict[Mutant, dict[str, Any]]()
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else []:
        row = json.loads(line)
        final = row["verdict"] != "survived" or row["ran"] == row["tests"]
        if row["state"] == state and (final or row["budget"] >= seconds):
            kept[Mutant(*(row[each.name] for each in fields(Mutant)))] = row
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as copies,
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), begin, (root, Path(copies))) as pool,
        results.open("a", encoding="utf-8") as file,
    ):
        waiting = {}
        for mutant in (each for each in mutants if each not in kept):
            tests = recording.tests(mutant)
            chosen = recording.within(tests, seconds)
            row = {**asdict(mutant), "state": state, "budget": seconds, "change": changed_line(root, mutant)}
            row |= {"tests": len(tests), "ran": len(chosen)}
            limit = 60 + 3 * sum(recording.seconds[test] for test in chosen)
            waiting[pool.submit(judge, mutant, [chosen[:FIRST], chosen[FIRST:]], limit)] = mutant, row
        for done in ProgressBar(as_completed(waiting), total=len(mutants), initial=len(mutants) - len(waiting), unit="mutant"):
            mutant, row = waiting[done]
            kept[mutant] = row | done.result()
            file.write(json.dumps(kept[mutant]) + "\n")
            file.flush()
    title = f"{len(mutants)} mutants, seed {seed}, of {lines} lines that an operator applies to. "
    title += f"Tests of a mutant: at most {seconds:g} seconds, as recorded."
    return report([kept[mutant] for mutant in mutants], title)


def main() -> None:
    from hf_posenc.evaluation import terminals
    from hf_posenc.serialization.atomic import write_text

    terminals.set_up()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="most recorded seconds of tests for a mutant")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="directories to mutate")
    parser.add_argument("--output_file", type=Path, help="file for the report, which is also printed")
    arguments = parser.parse_args()
    options = arguments.mutants, arguments.seed, arguments.processes, arguments.seconds
    text = measure(Path.cwd(), list(arguments.packages), *options)
    print(text, end="")
    if arguments.output_file:
        write_text(arguments.output_file, text)


if __name__ == "__main__":
    main()
