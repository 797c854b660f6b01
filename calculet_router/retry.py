"""What becomes of a request whose attempt came to nothing.

It is sent again while no generated token of it has been written (a non-streaming answer is written last of all). Losing workers
spends `max_resends`; refusals do not, since every worker is asked at most once. A request that outlives its resends is suspected
of killing workers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from calculet_core.errors import CalculetError, NoReadyWorker


class Trouble(StrEnum):
    """Why an attempt came to nothing; also the `reason` label of `calculet_router_resends`."""

    WORKER_LOST = "worker_lost"
    """The process ended, or another epoch took the board."""
    MESSAGE_LOST = "message_lost"
    """A gap in the worker's sequence numbers: tokens of anybody may be missing."""
    SILENT = "silent"
    """The link is suspect."""
    UNANSWERED = "unanswered"
    """Admission did not answer within the acceptance deadline."""
    REFUSED = "refused"
    """Admission said no."""
    FAILED = "failed"
    """It was admitted and failed for a reason that is the worker's, not its own."""
    UNSENT = "unsent"
    """The link could not take the message."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row."""

    spends_resend: bool
    excludes_worker: bool
    """The request does not go to this life of the worker again."""
    cancels: bool
    """The worker may still run the attempt."""


RETRY: dict[Trouble, Rule] = {
    Trouble.WORKER_LOST: Rule(spends_resend=True, excludes_worker=True, cancels=False),
    Trouble.MESSAGE_LOST: Rule(spends_resend=True, excludes_worker=False, cancels=True),
    Trouble.SILENT: Rule(spends_resend=True, excludes_worker=True, cancels=True),
    Trouble.UNANSWERED: Rule(spends_resend=False, excludes_worker=True, cancels=True),
    Trouble.REFUSED: Rule(spends_resend=False, excludes_worker=True, cancels=False),
    Trouble.FAILED: Rule(spends_resend=False, excludes_worker=True, cancels=False),
    Trouble.UNSENT: Rule(spends_resend=False, excludes_worker=True, cancels=False),
}


def last_word(refusals: Collection[CalculetError], alias: str) -> CalculetError:
    """The client's error once no eligible worker is left.

    Full beats absent: a 429 when any worker said so, else the last refusal; always with the smallest Retry-After.
    """
    if not refusals:
        return NoReadyWorker(f"no worker is ready to serve {alias!r}")
    full = [error for error in refusals if error.http_status == 429]
    chosen = (full or list(refusals))[-1]
    waits = [error.retry_after_s for error in full or refusals if error.retry_after_s is not None]
    return type(chosen)(chosen.message, param=chosen.param, retry_after_s=min(waits, default=None))
