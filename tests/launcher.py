"""Run scripts and code in separate processes, forked from a process that has already imported slow libraries.

A script can run in several processes (gloo), be killed with SIGKILL at a specified call, or have a file size limit.
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
"""Module search paths for code. Scripts have one more."""
HOSTS = ("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
LEVELS = {
    "torch": ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor")
    + ("scipy.optimize", "scipy.stats", "joblib", "pandas", "pytest")
    + ("safetensors.torch", "tokenizers", "httpx2", "jinja2", "yaml"),
    "libraries": ("transformers.generation", "accelerate", "sentence_transformers", *HOSTS),
    "scripts": ("finetune", "train_mlm", "train_clm", "distill", "sharded", "torch.utils.tensorboard"),
}
"""Level -> already imported modules, in addition to those of previous levels.

The first level contains only modules that read no settings of Hugging Face libraries. The second one adds other libraries, and
the third one adds the scripts and this repository's modules.
"""


class Launcher:
    """The client of the fork servers. There is one server for each used level."""

    def __init__(self):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (*PLACES, ROOT / "scripts")))
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, script, *arguments, processes=1, kill=None, largest_file=None, poison=True, **environment):
        """Run a script's `main`. Returns (exit codes, output). `kill` is ("module.name", n), for the n-th call."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"script": script, "arguments": list(map(str, arguments)), "processes": processes, "kill": kill, "port": port}
        job |= {"largest_file": largest_file, "poison": poison, "environment": environment}
        done = self._done({**job, "level": "scripts"})
        return done["codes"], done["said"]

    def run(self, code, *arguments, level, timeout, **settings):
        """Run code like `python -c`, in the working directory and environment of this process. `settings` override the latter.

        Returns (exit code, standard output, standard error).
        """
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
        with self.process:  # closes its pipes, which terminates it
            pass


def serve(jobs, answer, level, *later):
    """Run the jobs of a level in forks of this process. A forked server runs the jobs of later levels."""
    for name in LEVELS[level]:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    if remote_code := sys.modules.get("hf_posenc.serialization.remote_code"):
        remote_code.files("hf_posenc.modeling.derived", [], None)  # fills its cache for the next save
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
    """Fork a server for these levels. Returns the connection to it."""
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    serve(iter(theirs.recv, None), theirs.send, *levels)
    os._exit(0)


def done(job):
    """Run the processes of a job. Returns their exit codes and output."""
    folder = Path(tempfile.mkdtemp())
    children = {start(job, rank, folder): rank for rank in range(job["processes"])}
    codes = [0] * job["processes"]
    waiting = dict(children)
    while waiting:
        child, status = os.wait()
        codes[waiting.pop(child)] = os.waitstatus_to_exitcode(status)
        if status:  # like torchrun: if one process fails, kill all
            for other in waiting:
                os.kill(other, signal.SIGKILL)
    said, errors = ("".join(file.read_text() for file in sorted(folder.glob(f"*.{end}"))) for end in ("said", "errors"))
    shutil.rmtree(folder)
    return {"codes": codes, "said": said, "errors": errors}


def start(job, rank, folder):
    """Fork a process. Returns its ID. Scripts have one output file, and code has one each for standard output and error."""
    if child := os.fork():
        return child
    code, recording = 1, record(job["test"])
    try:
        # In a fork, torch creates its thread pool again at the first call, which isn't thread-safe. Transformers loads weights
        # in several threads, and one of them would find no pool ("Invalid thread pool!").
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
            with contextlib.suppress(Exception):  # fails in processes with a file size limit
                recording.save()
        os._exit(code)


def record(test):
    """Start to record the lines that this process runs for a test, if pytest-cov does so for `tools/mutate.py`."""
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
        os.dup2(nothing.fileno(), 0)  # instead of the job queue
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
    """The exit code of a process that only calls `run`."""
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
    """Kill this process at the n-th call of the named function, before the function runs."""
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
    os.fsync = lambda file: None  # killed processes lose nothing without it, and it takes half of the time
    serve(map(json.loads, sys.stdin), lambda done: print(json.dumps(done), flush=True), *LEVELS)
