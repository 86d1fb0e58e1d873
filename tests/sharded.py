"""Runs train_mlm.py with FSDP2 on CPUs. Accelerate allows FSDP2 only on GPUs, so this module sets its plugin explicitly."""

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from hf_posenc.training import flags, train_mlm


def main(argv):
    start = flags.start

    def sharded(arguments):
        accelerator = start(arguments)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        return accelerator

    flags.start = sharded
    train_mlm.main(argv)
