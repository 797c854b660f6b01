"""Every error a client or an operator can meet: one class = HTTP status + stable code.

On a data path a refusal is a value: `OverCapacity("waiting queue is full", retry_after_s=2)` is built and passed on. It is
raised only at edges. `Retry-After` is always sent with 429 and 503, so those classes carry a default.
"""

from __future__ import annotations

from typing import ClassVar


class CalculetError(Exception):
    """Base: `message` for people, `param` names the offending parameter when there is one."""

    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False
    """Whether a router may send the request to another worker."""
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s


class InvalidValue(CalculetError):
    http_status, code, type = 400, "invalid_value", "invalid_request_error"


class InvalidJson(CalculetError):
    http_status, code, type = 400, "invalid_json", "invalid_request_error"


class ContextLengthExceeded(CalculetError):
    http_status, code, type = 400, "context_length_exceeded", "invalid_request_error"


class Unsupported(CalculetError):
    """An ability that nobody has proven or built; the message names it."""

    http_status, code, type = 400, "unsupported", "invalid_request_error"


class ConstraintFailed(CalculetError):
    """An answer had to end: nothing that the model can write would have kept to the schema, or working that out took too much."""

    http_status, code, type = 400, "constraint_failed", "invalid_request_error"


class InvalidApiKey(CalculetError):
    http_status, code, type = 401, "invalid_api_key", "authentication_error"


class PermissionDenied(CalculetError):
    http_status, code, type = 403, "permission_denied", "permission_error"


class ModelNotFound(CalculetError):
    http_status, code, type = 404, "model_not_found", "invalid_request_error"


class NotFound(CalculetError):
    http_status, code, type = 404, "not_found", "invalid_request_error"


class MethodNotAllowed(CalculetError):
    http_status, code, type = 405, "method_not_allowed", "invalid_request_error"


class RequestTimeout(CalculetError):
    """The client did not finish its headers or body in time."""

    http_status, code, type = 408, "request_timeout", "invalid_request_error"


class RequestTooLarge(CalculetError):
    http_status, code, type = 413, "request_too_large", "invalid_request_error"


class UnsupportedMediaType(CalculetError):
    """A body that is coded (compressed); it is taken only as it is."""

    http_status, code, type = 415, "unsupported_media_type", "invalid_request_error"


class HeadersTooLarge(CalculetError):
    http_status, code, type = 431, "headers_too_large", "invalid_request_error"


class OverCapacity(CalculetError):
    http_status, code, type, retryable, default_retry_after_s = 429, "over_capacity", "rate_limit_error", True, 1.0


class TenantRateLimited(CalculetError):
    http_status, code, type, default_retry_after_s = 429, "tenant_rate_limited", "rate_limit_error", 1.0


class TenantQuota(CalculetError):
    http_status, code, type, retryable, default_retry_after_s = 429, "tenant_quota", "rate_limit_error", True, 1.0


class InternalError(CalculetError):
    pass


class ArtifactRejected(CalculetError):
    """The board's runtime rejected the artifact's shapes or types (rc 21, 22)."""

    code = "artifact_rejected"


class BadOutput(CalculetError):
    """The board returned NaN or Inf; the numbers were dropped."""

    code = "bad_output"


class NoReadyWorker(CalculetError):
    http_status, code, retryable, default_retry_after_s = 503, "no_ready_worker", True, 2.0


class ModelDraining(CalculetError):
    http_status, code, retryable, default_retry_after_s = 503, "model_draining", True, 2.0


class ModelRecovering(CalculetError):
    http_status, code, retryable, default_retry_after_s = 503, "model_recovering", True, 5.0


class StaleView(CalculetError):
    """The router's view named a generation or epoch that this worker does not have; it re-reads and resends."""

    http_status, code, retryable, default_retry_after_s = 503, "stale_view", True, 1.0


class DeviceBusy(CalculetError):
    http_status, code, retryable, default_retry_after_s = 503, "device_busy", True, 1.0


class BoardFailed(CalculetError):
    http_status, code, retryable, default_retry_after_s = 503, "board_failed", True, 5.0


class WorkerLost(CalculetError):
    """The worker died with the request; it had begun to answer, or two resends were lost too."""

    http_status, code, default_retry_after_s = 503, "worker_lost", 2.0


class ShuttingDown(CalculetError):
    http_status, code, retryable, default_retry_after_s = 503, "shutting_down", True, 2.0


class SlowReader(CalculetError):
    """The client read too slowly: its output buffer was full. Seen in journals only."""

    http_status, code = 503, "slow_reader"


class DeadlineExceeded(CalculetError):
    http_status, code, type = 504, "deadline_exceeded", "timeout_error"


ERROR_TYPES: dict[str, type[CalculetError]] = {
    cls.code: cls
    for cls in (
        InvalidValue, InvalidJson, ContextLengthExceeded, Unsupported, ConstraintFailed, InvalidApiKey,
        PermissionDenied, ModelNotFound, NotFound, MethodNotAllowed, RequestTimeout, RequestTooLarge, UnsupportedMediaType,
        HeadersTooLarge, OverCapacity, TenantRateLimited, TenantQuota, InternalError, ArtifactRejected, BadOutput, NoReadyWorker,
        ModelDraining, ModelRecovering, StaleView, DeviceBusy, BoardFailed, WorkerLost, ShuttingDown, SlowReader,
        DeadlineExceeded,
    )
}  # fmt: skip


def error_from_code(
    code: str, message: str, param: str | None = None, retry_after_s: float | None = None
) -> CalculetError:
    """Rebuild an error that crossed the wire; an unknown code (a newer peer's) becomes `internal_error`."""
    return ERROR_TYPES.get(code, InternalError)(message, param=param, retry_after_s=retry_after_s)


class ConfigError(Exception):
    """A configuration or manifest is wrong: names the file, the path in it and what would be right. Exit code 78."""


class ArtifactError(Exception):
    """A package is missing, incomplete, tampered with or not trusted; names the file. Exit code 78 at start."""


class ExitCode:
    """Exit codes of Calculet's processes."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    BUG = 70
    BOARD_UNAVAILABLE = 75
    UNAVAILABLE = 75
    """Something of the machine is missing for now: a board, room on a disk, a folder that may be written."""
    CONFIG = 78
