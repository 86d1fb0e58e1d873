"""Training with Accelerate: commands, tasks, data, checkpoints, and a resumable training loop."""

from importlib.util import find_spec

if missing := [name for name in ("accelerate", "datasets") if find_spec(name) is None]:
    raise ImportError(f'hf_posenc.training needs {" and ".join(missing)}. Run: pip install "hf-posenc[train]"')
