"""Two sets of ranks on the same GPUs, taking turns: one measures, the other waits.

What each measures is its own. Waiting is on the host, in a store that whoever started
both sets keeps, and ends after a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch.distributed import Store

SIDES = 2


class Turns:
    """One rank's view of whose turn it is. Every rank of a side takes every turn.

    side: 0 or 1; 0 begins. together: called by all ranks of a side at the end of a
    turn, returns once all of them are through, their devices idle.
    """

    def __init__(
        self,
        store: Store,
        side: int,
        rank: int,
        together: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.store, self.rank, self.together = store, rank, together
        self.next = side
        self.timeout = timedelta(seconds=timeout_s)

    @staticmethod
    def begin(store: Store) -> None:
        """Let side 0 take the first turn. Called once."""
        store.set(_key(0), "")

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """The body runs while the other side waits.

        Raises DistStoreError if the other side's turn doesn't end in time. A turn whose
        body raises isn't passed on.
        """
        self.store.wait([_key(self.next)], self.timeout)
        yield
        self.together()
        if self.rank == 0:
            self.store.set(_key(self.next + 1), "")
        self.next += SIDES


def _key(turn: int) -> str:
    return f"turn {turn}"
