"""Controlled studies of encodings: `hf-posenc compare` trains models that differ only in their encoding.

`Task` and `register_task` define a custom task. The other modules:

- `tasks`, `texts`: the tasks, and the texts that some of them read
- `models`, `selection`: the models and encodings of a study, and how they are specified
- `runs`, `study`: one run, and all runs, which can be interrupted and resumed
- `results`, `record`, `tables`: scores of finished runs, compare.json, and tables
- `trained_models`: trained models of --save
- `flags`, `files`: the command line and study files
"""

from hf_posenc.studies.tasks import IGNORED, Task, register_task

__all__ = ["IGNORED", "Task", "register_task"]
