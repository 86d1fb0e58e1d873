"""The counting task of CoPE (Golovneva et al., 2024: https://arxiv.org/abs/2405.18719), for `hf-posenc compare --import`.

A row is a program of N operations: a variable is set to 0, a variable is incremented, or nothing happens. At the end, one
variable is printed, and its value is the answer. Values are at most MOST.
"""

import torch
from torch import Generator, Tensor

from hf_posenc.studies import IGNORED, Task, register_task

VARIABLES, MOST = 3, 10
SET, INCREMENT, PASS = 0, VARIABLES, 2 * VARIABLES
"""The tokens that set and increment variable 0, followed by those of the other variables, and the one for nothing."""
PRINT = PASS + 1
VALUE = PRINT + VARIABLES
"""The tokens that print variable 0 and stand for the value 0, followed by those of other variables and values."""
SHARES = (0.1, 0.5, 0.4)
"""Shares of operations that set, increment, and do nothing."""


def rows(length: int, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    kinds = torch.multinomial(torch.tensor(SHARES), length * count, replacement=True, generator=generator).view(count, length)
    variables = torch.randint(VARIABLES, (count, length), generator=generator)
    values, every = torch.zeros(count, VARIABLES, dtype=torch.long), torch.arange(count)
    operations = torch.full((count, length), PASS)
    for place in range(length):
        variable = variables[:, place]
        now = values[every, variable]
        sets, increments = kinds[:, place] == 0, (kinds[:, place] == 1) & (now < MOST)
        operations[:, place] = (SET + variable).where(sets, (INCREMENT + variable).where(increments, operations[:, place]))
        values[every, variable] = (now + increments).masked_fill(sets, 0)
    printed = torch.randint(VARIABLES, (count,), generator=generator)
    answer = VALUE + values[every, printed]
    input_ids = torch.cat([operations, PRINT + printed[:, None], answer[:, None]], dim=1)
    labels = torch.full_like(input_ids, IGNORED)
    labels[:, -1] = answer
    return input_ids, labels


register_task(
    "counting",
    Task(
        rows=rows,
        metric="accuracy",
        vocabulary=VALUE + MOST + 1,
        chance=1 / (MOST + 1),
        unit="operations",
        length=24,
        steps=2000,
        batch_size=64,
    ),
)
