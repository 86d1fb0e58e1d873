"""Six users. Their scripts use only what the documentation promises, and each step is a process of its own.

`python tests/users/SCRIPT.py ARGUMENTS` runs a step by itself. A rewrite of the package or of the tests leaves the scripts as
they are.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, run_python
from hub_server import TOKEN, serve

USERS = Path(__file__).parent
START = """
import os, runpy, sys
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("long_documents", ("train", "predict")),
        ("own_encoding", ("save", "load", "load_without_the_package")),
        ("old_checkpoint", (ROOT / "tests" / "v4" / "bert",)),
        ("overwrite", ("save", "load")),
        ("sharded_or_offloaded", ("offloaded",)),
    ],
)
def test_user(script, steps, tmp_path):
    for step in steps:
        run_python(START, USERS / f"{script}.py", tmp_path, step, HF_MODULES_CACHE=str(tmp_path / "modules"))


def test_user_of_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command.append(USERS / "sharded_or_offloaded.py")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]


def test_user_of_the_hub(tmp_path):
    with serve() as hub:
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        settings |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        run_python(START, USERS / "push.py", tmp_path, fresh=True, **settings)
