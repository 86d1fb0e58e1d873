"""Runs the tests on a GPU for a limited time, and records what they measure.

HF_POSENC_GPU is the device; `cpu` rehearses with small inputs. After GPU_SECONDS, no other test starts. OUT gets gpu.jsonl.
"""

import faulthandler
import json
import os
import time
from pathlib import Path

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})  # in each process

import pytest
import torch
import transformers

DEVICE = os.environ.get("HF_POSENC_GPU", "cuda")
DEADLINE = float(os.environ.setdefault("GPU_DEADLINE", str(time.time() + float(os.environ.get("GPU_SECONDS", "240")))))
OUT, LINES = Path(os.environ.get("OUT", "build/gpu")), []
OUT.mkdir(parents=True, exist_ok=True)
if DEVICE == "cuda" and not torch.cuda.is_available():
    raise SystemExit("no GPU here. HF_POSENC_GPU=cpu rehearses the tests on a CPU")


def pytest_runtest_setup():
    if (left := DEADLINE - time.time()) < 0:
        pytest.skip("left out")
    torch._dynamo.reset()  # Else flex attention would run uncompiled after eight tests.
    faulthandler.dump_traceback_later(left + 45, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    result = yield  # Values are compared with their bounds afterwards, so that all are recorded.
    above = [f"{name}: {value} > {bound}" for name, (value, bound) in pyfuncitem.user_properties if not value <= bound]
    assert not above, "; ".join(above)
    return result


@pytest.fixture
def check(record_property):
    return lambda name, value, bound: record_property(name, [float(f"{float(each):.3g}") for each in (value, bound)])


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    line = {"test": report.nodeid.partition("::test_")[2], "outcome": report.outcome, "seconds": round(report.duration, 1)}
    why = {} if report.passed else {"why": str(report.longrepr)[-400:]}
    LINES.append({**line, "device": DEVICE, **why, **dict(report.user_properties)})
    with (OUT / "gpu.jsonl").open("a") as file:
        print(json.dumps(LINES[-1]), file=file)


def pytest_terminal_summary(terminalreporter):
    say, device = terminalreporter.write_line, torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    say("\n".join(map(json.dumps, LINES)))
    say(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}")
    for group in dict.fromkeys(line["test"][:2] for line in LINES):
        ran = [line for line in LINES if line["test"].startswith(group) and line["outcome"] != "skipped"]
        shares = [(each[0] / each[1], name) for line in ran for name, each in line.items() if type(each) is list and each[1]]
        passed = len([line for line in ran if line["outcome"] == "passed"])
        say(f"{group}: {passed} of {len(ran)} passed. Nearest to its bound: {max(shares, default='nothing')}")
    say(f"left out: {' '.join(line['test'] for line in LINES if line['outcome'] == 'skipped') or 'nothing'}")
