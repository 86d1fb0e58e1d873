"""Training with Accelerate: commands, tasks, data, checkpoints, and a loop that survives a kill."""

from importlib.util import find_spec

if missing := [name for name in ("accelerate", "datasets") if find_spec(name) is None]:
    raise ImportError(f'hf_posenc.training needs {" and ".join(missing)}: pip install "hf-posenc[train]"')
