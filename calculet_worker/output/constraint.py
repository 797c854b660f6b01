"""What the sampler asks of a constraint's state: which tokens may come next.

The grammar library's wrapper is in the shell (`shell/constraints`), which compiles off the actor's path. A mask is worked out while
the device computes (`prepare`, after the next job went out), so that a draw finds it ready, in the form that costs it least. An
answer without a constraint has no matcher and pays nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Matcher(Protocol):
    """One answer's way through its grammar."""

    def mask(self) -> NDArray[np.float32] | None:
        """What is added to logits, float32 [vocabulary]: 0 for ids that may come next, -inf for others.

        None: no id may, or that is too hard to tell (see `failure`).
        """
        ...

    def accept(self, token_id: int) -> None:
        """The token that is to come, one that was allowed; `failure` is set where the grammar does not take it after all."""
        ...

    def prepare(self) -> None:
        """Work out the next mask now, since there is time."""
        ...

    @property
    def complete(self) -> bool:
        """The answer is whole and nothing may follow."""
        ...

    @property
    def failure(self) -> str:
        """Why no id may come, in words."""
        ...
