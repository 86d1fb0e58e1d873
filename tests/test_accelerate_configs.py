"""The launch configurations of scripts/accelerate: Accelerate can read them, and starts the processes that they define."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import chain

import pytest
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import patch_environment
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch.distributed.fsdp import StateDictType

from conftest import ROOT
from models import HOSTS, shared

FOLDER = ROOT / "scripts" / "accelerate"
CONFIGS = {"cpu", "multi_gpu", "multi_node", "fsdp2", "zero2", "zero3"}


def launched(name, *options):
    """The arguments that Accelerate's launcher reads from a configuration."""
    parser = launch_command_parser()
    arguments, _, _ = _validate_launch_command(
        parser.parse_args(["--config_file", str(FOLDER / f"{name}.yaml"), *options, "script.py"])
    )
    return arguments


def test_there_are_no_others():
    assert {path.stem for path in FOLDER.iterdir()} == CONFIGS


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_accelerate_knows_every_key(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert isinstance(config, ClusterConfig) and config.num_processes > 1
    # Accelerate accepts any keys in these two sections, and ignores the unknown ones.
    known = vars(launch_command_parser().parse_args(["script.py"]))
    assert {*config.fsdp_config, *config.deepspeed_config} <= set(known)
    assert f"accelerate launch --config_file scripts/accelerate/{name}.yaml " in (FOLDER / f"{name}.yaml").read_text()


def test_fsdp2():
    arguments = launched("fsdp2")
    assert arguments.use_fsdp and arguments.mixed_precision == "bf16"
    with patch_environment(**prepare_multi_gpu_env(arguments)):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.auto_wrap_policy is None
    assert not plugin.activation_checkpointing and not plugin.cpu_ram_efficient_loading


@pytest.mark.parametrize("stage", [2, 3])
def test_zero(stage):
    arguments = launched(f"zero{stage}")
    assert arguments.use_deepspeed
    arguments.deepspeed_fields_from_accelerate_config = ""  # set by launch_command, which would start it
    _, environment = prepare_deepspeed_cmd_env(arguments)
    with patch_environment(**environment):
        plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == stage and plugin.zero3_init_flag is False
    assert plugin.zero3_save_16bit_model is (stage == 3)
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == "auto"
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0


@pytest.mark.parametrize("host", sorted(HOSTS))
def test_derived_classes_name_the_same_layers(host):
    """A derived class names the same layers as the original class. FSDP's layer wrapping and device_map use these names."""
    model = shared(host, "t5", HOSTS[host].head)
    names = set(model._no_split_modules)
    assert names == set(shared(host, head=HOSTS[host].head)._no_split_modules)
    assert names <= {type(module).__name__ for module in model.modules()}


COUNT = """
from accelerate import Accelerator
accelerator = Accelerator()
print(f"<{accelerator.num_processes} {accelerator.device.type} {accelerator.process_index}>", flush=True)
accelerator.wait_for_everyone()  # a process that ends earlier breaks the connections of the others
accelerator.end_training()
"""


def start(script, name, *options):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / f"{name}.yaml"), *options]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, str(script)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(process):
    shown, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-3000:]
    return re.findall("<.*?>", shown)  # two processes may write to one line


@pytest.mark.slow
def test_processes_are_started(tmp_path):
    """One launcher starts two processes. Two launchers on one machine start one process each."""
    (tmp_path / "count.py").write_text(COUNT)
    both = ["<2 cpu 0>", "<2 cpu 1>"]
    assert sorted(finished(start(tmp_path / "count.py", "cpu"))) == both
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    options = ("--num_processes", "2", "--main_process_ip", "localhost", "--main_process_port", port, "--machine_rank")
    with ExitStack() as stack:
        nodes = [stack.enter_context(start(tmp_path / "count.py", "multi_node", *options, rank)) for rank in "01"]
        assert sorted(chain(*map(finished, nodes))) == both
