"""Run scripts and code in separate processes, forked from a process that has already imported slow libraries.

All processes that run tests share the fork servers. A script can run in several processes (gloo), be killed with SIGKILL at a
specified call, or have a file size limit.
"""

import contextlib
import gc
import importlib.util
import json
import multiprocessing.connection
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


class Servers:
    """The fork servers: one for each level that a test uses. They end with this process, or when they are closed."""

    def __init__(self):
        self.folder = tempfile.mkdtemp()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (*PLACES, ROOT / "scripts")))
        with listener_at(self.folder, "torch") as first:
            command = [sys.executable, __file__, self.folder, str(first.fileno())]
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, pass_fds=[first.fileno()], env=environment, **streams)

    def close(self):
        with self.process:  # closes its standard input, which terminates the servers
            pass
        shutil.rmtree(self.folder)


class Launcher:
    """The client of the fork servers in a directory."""

    def __init__(self, folder):
        self.folder = folder

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
        for level in LEVELS:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(f"{self.folder}/{level}")
                with server.makefile("rw") as lines:
                    send(lines, job)
                    if done := json.loads(lines.readline()):
                        return done


def send(lines, value):
    lines.write(json.dumps(value) + "\n")
    lines.flush()


def listener_at(folder, level):
    """The socket of a level's server. Clients can connect before the server has imported its libraries."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/{level}")
    listener.listen()
    return listener


def serve(folder, listener, level, *later):
    """Run each job of a level in a fork of this process. The first job of a later level starts the server of the next level."""
    places, started = [listener, sys.stdin], False
    multiprocessing.connection.wait(places)
    for name in LEVELS[level]:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    if remote_code := sys.modules.get("hf_posenc.serialization.remote_code"):
        remote_code.files("hf_posenc.modeling.derived", [], None)  # fills its cache for the next save
    gc.freeze()
    while sys.stdin not in multiprocessing.connection.wait(places):
        client, _ = listener.accept()
        with client, client.makefile("rw") as lines:
            job = json.loads(lines.readline())
            if job["level"] != level:
                started = started or fork_server(folder, *later)
                send(lines, None)
            elif not os.fork():
                send(lines, done(job))
                os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def fork_server(folder, level, *later):
    """Fork the server of a level, whose socket exists when this function returns."""
    listener = listener_at(folder, level)
    if not os.fork():
        serve(folder, listener, level, *later)
        os._exit(0)
    listener.close()
    return True


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
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), *LEVELS)
