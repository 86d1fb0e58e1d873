"""Training with Accelerate: commands, tasks, data, checkpoints, and a resumable training loop."""

from importlib.util import find_spec

from hf_posenc._versions import install

if missing := [name for name in ("accelerate", "datasets") if find_spec(name) is None]:
    raise ImportError(f"hf_posenc.training needs {' and '.join(missing)}. Run: {install('train')}")
