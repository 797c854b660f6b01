"""Names of the server's events on a request's way (acceptance §2.3), in their order."""

from __future__ import annotations

from enum import StrEnum


class TraceEvent(StrEnum):
    """Prefill and decode both pass `JOB_PREPARED` to `TOKEN_FLUSHED`, once per step."""

    ACCEPTED = "accepted"
    SLOT_ASSIGNED = "slot_assigned"
    """In our terms: a hardware lane is reserved."""
    ADMITTED = "admitted"
    JOB_PREPARED = "job_prepared"
    SUBMIT_START = "submit_start"
    SUBMIT_OK = "submit_ok"
    WAIT_DONE = "wait_done"
    LOGITS_READY = "logits_ready"
    SAMPLED = "sampled"
    TOKEN_FLUSHED = "token_flushed"
