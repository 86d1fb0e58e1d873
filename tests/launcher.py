"""Runs of the scripts in processes of their own, forked from one that has imported everything: half a second, not eight.

A run may be several processes (gloo), be killed with SIGKILL at a given call, or be forbidden to write large files.
"""

import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Launcher:
    """The forking process, as its parent sees it."""

    def __init__(self):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "scripts", ROOT / "tests")))
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
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        return done["codes"], done["said"]

    def close(self):
        with self.process:  # closes its pipes, which ends it
            pass


def serve():
    import torch

    torch.set_num_threads(1)
    scripts = ("finetune", "train_mlm", "train_clm", "distill")
    for name in (*scripts, "sharded", "sentence_transformers", "torch.utils.tensorboard"):
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        outputs = [Path(f"/tmp/launcher-{os.getpid()}-{rank}") for rank in range(job["processes"])]
        children = {start(job, rank, outputs[rank]): rank for rank in range(job["processes"])}
        codes = [0] * job["processes"]
        waiting = dict(children)
        while waiting:
            child, status = os.wait()
            codes[waiting.pop(child)] = os.waitstatus_to_exitcode(status)
            if status:  # as torchrun does: one is down, all are
                for other in waiting:
                    os.kill(other, signal.SIGKILL)
        said = "".join(output.read_text() for output in outputs)
        for output in outputs:
            output.unlink()
        print(json.dumps({"codes": codes, "said": said}), flush=True)


def start(job, rank, output):
    """Fork; the child's number."""
    if child := os.fork():
        return child
    code = 1
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            code = run(job, rank)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


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
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    try:
        importlib.import_module(job["script"]).main(job["arguments"])
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
    serve()
