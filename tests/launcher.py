"""Runs of the scripts, and of code, in processes of their own, forked from one that has imported what takes seconds.

A run of a script may be several processes (gloo), be killed with SIGKILL at a given call, or be forbidden to write large files.
"""

import contextlib
import gc
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = (ROOT, ROOT / "tests")
"""Of modules, for code. Scripts find more."""
HOSTS = ("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
LEVELS = {
    "torch": ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor")
    + ("scipy.optimize", "safetensors.torch", "tokenizers", "httpx2", "jinja2", "yaml"),
    "libraries": ("transformers.generation", "accelerate", "sentence_transformers", "pytest", *HOSTS),
    "scripts": ("finetune", "train_mlm", "train_clm", "distill", "sharded", "torch.utils.tensorboard"),
}
"""What a process finds imported, at each level also what those before have: at first only what reads no setting of Hugging
Face's libraries, then other libraries, then the scripts and this repository's modules."""


class Launcher:
    """The forking processes, one for each level that is used, as their parent sees them."""

    def __init__(self):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (*PLACES, ROOT / "scripts")))
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, script, *arguments, processes=1, kill=None, largest_file=None, poison=True, **environment):
        """Run a script's main; (exit codes, what the processes said). `kill` is ("module.name", n): at its n-th call."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"script": script, "arguments": list(map(str, arguments)), "processes": processes, "kill": kill, "port": port}
        job |= {"largest_file": largest_file, "poison": poison, "environment": environment}
        done = self._done({**job, "level": "scripts"})
        return done["codes"], done["said"]

    def run(self, code, *arguments, level, timeout, **settings):
        """Run code as `python -c` does, in the folder and the environment of this process with `settings` over it; (exit
        code, what it printed, and on standard error)."""
        job = {"code": code, "arguments": list(map(str, arguments)), "processes": 1, "timeout": timeout, "level": level}
        places = os.pathsep.join(map(str, PLACES))
        environment = {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1", **settings}
        done = self._done({**job, "folder": os.getcwd(), "environment": environment})
        return done["codes"][0], done["said"], done["errors"]

    def _done(self, job):
        job["test"] = os.environ.get("PYTEST_CURRENT_TEST", "")
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        with self.process:  # closes its pipes, which ends it
            pass


def serve(jobs, answer, level, *later):
    """Do the jobs of a level, each in forks of this process; those of later levels go to a fork which serves them."""
    for name in LEVELS[level]:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    if remote_code := sys.modules.get("hf_posenc.serialization.remote_code"):
        remote_code.files("hf_posenc.modeling.derived", [], None)  # as it keeps them for the next save
    gc.freeze()
    behind = None
    for job in jobs:
        if job["level"] == level:
            answer(done(job))
            continue
        behind = behind or fork_server(later)
        behind.send(job)
        answer(behind.recv())
    if behind:
        behind.send(None)
        os.wait()


def fork_server(levels):
    """A process that serves these levels: the connection to it."""
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    serve(iter(theirs.recv, None), theirs.send, *levels)
    os._exit(0)


def done(job):
    """What came of the processes of a job."""
    folder = Path(tempfile.mkdtemp())
    children = {start(job, rank, folder): rank for rank in range(job["processes"])}
    codes = [0] * job["processes"]
    waiting = dict(children)
    while waiting:
        child, status = os.wait()
        codes[waiting.pop(child)] = os.waitstatus_to_exitcode(status)
        if status:  # as torchrun does: one is down, all are
            for other in waiting:
                os.kill(other, signal.SIGKILL)
    said, errors = ("".join(file.read_text() for file in sorted(folder.glob(f"*.{end}"))) for end in ("said", "errors"))
    shutil.rmtree(folder)
    return {"codes": codes, "said": said, "errors": errors}


def start(job, rank, folder):
    """Fork; the child's number. What a script says is one text, of code in two."""
    if child := os.fork():
        return child
    code, recording = 1, record(job["test"])
    try:
        # In a fork torch makes its pool of threads anew at the first call, which isn't for several threads at once, in which
        # Transformers loads weights: one would find the pool gone ("Invalid thread pool!").
        sys.modules["torch"].set_num_threads(1)
        with (folder / f"{rank}.said").open("w") as said, (folder / f"{rank}.errors").open("w") as errors:
            os.dup2(said.fileno(), 1)
            os.dup2(errors.fileno() if "code" in job else said.fileno(), 2)
            code = run_code(job) if "code" in job else run(job, rank)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        if recording:
            recording.stop()
            with contextlib.suppress(Exception):  # of a process that may write small files alone
                recording.save()
        os._exit(code)


def record(test):
    """Begin to record which lines this process runs for a test, if pytest-cov does so: `tools/mutate.py` asks for that."""
    if not (file := os.environ.get("COVERAGE_FILE")):
        return None
    from coverage import Coverage

    nodeid, _, phase = test.rpartition(" ")
    context = f"{nodeid}|{'run' if phase == '(call)' else phase.strip('()')}"
    recording = Coverage(file, data_suffix=True, config_file=False, include=[f"{ROOT}/hf_posenc/*"], context=context)
    recording.set_option("run:disable_warnings", ["no-data-collected"])
    recording.start()
    return recording


def run_code(job):
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    ours = {str(place) for place in (*PLACES, ROOT / "scripts")}
    sys.path[:] = ["", *job["environment"]["PYTHONPATH"].split(os.pathsep), *(place for place in sys.path if place not in ours)]
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # in place of the jobs
    signal.alarm(job["timeout"])
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c", *job["arguments"]]
    return _code_of(lambda: exec(compile(job["code"], "<string>", "exec", dont_inherit=True), vars(main)))


def run(job, rank):
    os.environ.update(job["environment"])
    if job["processes"] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["processes"], "LOCAL_WORLD_SIZE": job["processes"]}
        os.environ.update({key: str(value) for key, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
    if job["poison"]:
        from memory import poison_empty

        poison_empty()
    if job["kill"]:
        kill_at(*job["kill"])
    if job["largest_file"]:
        import resource  # which Windows doesn't have

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    return _code_of(lambda: importlib.import_module(job["script"]).main(job["arguments"]))


def _code_of(run):
    """The exit code of a process that does this alone."""
    try:
        run()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def kill_at(path, number):
    """Let this process be killed at the n-th call of what is named: before it does anything."""
    owner, name = path.rsplit(".", 1)
    try:
        owner = importlib.import_module(owner)
    except ModuleNotFoundError:
        module, attribute = owner.rsplit(".", 1)
        owner = getattr(importlib.import_module(module), attribute)
    original, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    os.fsync = lambda file: None  # a process that is killed loses nothing by it, and it is half of a run's time
    serve(map(json.loads, sys.stdin), lambda done: print(json.dumps(done), flush=True), *LEVELS)
