"""Every message between processes: MessagePack, the kind in a frame of its own, typed.

Decoding is strict about what it needs and tolerant of fields it does not know, so that versions can be mixed during an
upgrade. Hot messages are arrays (fields may only be appended), the others maps. `encode` gives the two frames, `decode` the
message. ZeroMQ adds the peer's identity frame where the socket is a ROUTER.

Links: router DEALER -> worker ROUTER (data); worker and router DEALER -> supervisor ROUTER (control). The CLI speaks
`calculet_core.shell.control_client`'s stream instead.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from calculet_core.chaos import AnyFault
from calculet_core.requests import Constraint, Prompt, SamplingParams, StopRules

PROTOCOL = 1
"""Raised when a message changes in a way that an older peer cannot ignore."""


class WireError(ValueError):
    """Bytes that are no message: unknown kind, wrong type, a missing field. Counted and ignored by receivers."""


# ------------------------------------------------------------------------------------------------ router -> worker
class RouterHello(msgspec.Struct, frozen=True):
    """First message on a data link, repeated after every reconnect."""

    router: int
    """The router's incarnation (32 bits)."""
    pid: int
    protocol: int = PROTOCOL


class Submit(msgspec.Struct, array_like=True, frozen=True):
    """One attempt of one request. `epoch`, `generation` and `digest` are what the router's view says it talks to."""

    request_id: int
    attempt: int
    epoch: int
    generation: int
    digest: str
    alias: str
    tenant: str
    weight: float
    prompt: Prompt
    max_new_tokens: int | None
    sampling: SamplingParams
    stop: StopRules
    deadline_ns: int
    deadline_asked: bool
    accepted_ns: int
    want_token_ids: bool = False
    echo: bool = False
    """The answer begins with the text of the prompt's ids."""
    traceparent: str | None = None
    """W3C Trace Context: the parent of the worker's spans."""
    constraint: Constraint | None = None
    """Sent only to workers whose hello says `constrains`."""


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """Idempotent; a key that the worker does not know is ignored."""

    request_id: int
    attempt: int
    epoch: int
    reason: str


class Lookup(msgspec.Struct, array_like=True, frozen=True):
    """A question about tokens: encode `prompt`, or decode `token_ids` where it is None. Ids are the router's own counter."""

    request_id: int
    epoch: int
    digest: str
    prompt: Prompt | None
    token_ids: tuple[int, ...] = ()
    want_pieces: bool = False
    """Also each token's bytes."""


class Lease(msgspec.Struct, array_like=True, frozen=True):
    """Sent every second. Without it the worker cancels the router's requests; `acked_seq` returns credit."""

    router: int
    epoch: int
    acked_seq: int


# ------------------------------------------------------------------------------------------------ worker -> router
class WorkerHello(msgspec.Struct, frozen=True):
    """Answer to `RouterHello`, and sent again whenever generation or state changes."""

    board: str
    epoch: int
    pid: int
    generation: int
    digest: str
    alias: str
    state: str
    """Name of a `ModelState`."""
    protocol: int = PROTOCOL
    versions: dict[str, str | None] = {}
    """Of the device: `device`, `serial_hash`, `runtime`, `driver`, `firmware`, `power_mode`; None where unknown."""
    chips: int = 0
    constrains: bool = False
    """Whether it can hold an answer to a `Constraint`."""
    seq: int | None = None
    """Number of the last `Tick` for this router: from the first one on, none is lost unnoticed. None: the worker does not say."""


class Load(msgspec.Struct, array_like=True, frozen=True):
    """A worker's load; `cost` counts the prompt and output tokens that are admitted or waiting and not done yet."""

    active: int
    lanes: int
    waiting: int
    waiting_tokens: int
    cost: float


class Acceptance(msgspec.Struct, array_like=True, frozen=True):
    """Admission answered Admit or Queue."""

    request_id: int
    attempt: int
    prompt_tokens: int
    max_new_tokens: int


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """A `CalculetError` on the wire."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """Admission refused; `retryable` says whether another worker may take it."""

    request_id: int
    attempt: int
    error: ErrorInfo
    retryable: bool


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """One token with its alternatives, natural logarithms."""

    token_id: int
    token_bytes: bytes
    logprob: float
    """NaN: it has none, since nothing came before it."""
    top: list[tuple[int, bytes, float]]


class ToolCallPart(msgspec.Struct, array_like=True, frozen=True):
    """Some more of one call: its name comes first, with whatever of the arguments is there, and once."""

    index: int
    """Which of the answer's calls, from 0."""
    name: str | None
    arguments: str


class Usage(msgspec.Struct, array_like=True, frozen=True):
    """The server's count, which is the truth; times in nanoseconds, None where unknown."""

    prompt_tokens: int
    completion_tokens: int
    queue_ns: int | None = None
    prefill_ns: int | None = None
    decode_ns: int | None = None
    device_ns: int | None = None
    token_hash: str | None = None


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """What one tick brought for one request. `finish` or `error` marks its terminal; usage comes with either."""

    request_id: int
    attempt: int
    tokens: int
    """Tokens generated since the last piece; text may lag behind (held for UTF-8 or a stop string)."""
    text: str
    finish: str | None = None
    error: ErrorInfo | None = None
    usage: Usage | None = None
    token_ids: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    calls: list[ToolCallPart] | None = None


class LookupAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Ids of a prompt, or the text of ids, or why not."""

    request_id: int
    epoch: int
    token_ids: list[int] = []
    pieces: list[bytes] | None = None
    text: str | None = None
    error: ErrorInfo | None = None


class Tick(msgspec.Struct, array_like=True, frozen=True):
    """All that one loop pass of a worker has for one router. A gap in `seq` is a lost message: a counted error."""

    epoch: int
    seq: int
    pieces: list[Piece]
    accepted: list[Acceptance] = []
    refused: list[Refusal] = []
    load: Load | None = None


# ------------------------------------------------------------------------------------------------ worker -> supervisor
class ChipReport(msgspec.Struct, frozen=True):
    """`ChipTelemetry` on the wire."""

    temperature_c: float | None = None
    power_w: float | None = None
    frequency_mhz: float | None = None
    throttled: bool | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


class WorkerReport(msgspec.Struct, frozen=True):
    """A progress heartbeat: `steps` must grow while `inflight` is above 0, or the board hangs."""

    board: str
    epoch: int
    pid: int
    protocol: int
    endpoint: str
    """Where routers connect."""
    state: str
    """Name of a `ModelState`."""
    generation: int = 0
    digest: str = ""
    alias: str = ""
    command_seq: int = 0
    """The last command that was carried out or refused."""
    command_error: str | None = None
    draining: bool = False
    steps: int = 0
    inflight: int = 0
    max_inflight: int = 1
    pingpong_off: str | None = None
    """Why only one job may be in flight though two are configured, in words."""
    lanes: dict[str, int] = {}
    """Lanes by `KvSequenceState` name."""
    kv_tokens_reserved: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    active: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    queues: dict[str, int] = {}
    """Depth by `decode`, `short`, `medium`, `long`."""
    fault: str | None = None
    """Name of a `FaultKind` while recovering or failed."""
    fault_detail: str | None = None
    wants_reset: bool = False
    """Recovering and asking for a spend of the reset budget."""
    condemned: str | None = None
    """Why the board must not be used, in words."""
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    resets: int = 0
    load_step: str | None = None
    """Which step of a load runs, with its progress."""
    device: str = ""
    serial_hash: str | None = None
    runtime: str | None = None
    driver: str | None = None
    firmware: str | None = None
    power_mode: str | None = None
    chips: list[ChipReport] = []
    rss_bytes: int = 0
    lost_messages: int = 0
    config_start: str = ""
    """Digest of what it took of the configuration at its start (`calculet_core.applying`)."""
    config_live: str = ""
    """Digest of what it holds of it live."""
    config_error: str | None = None
    """Why the last configuration that it was told to take was not taken."""


# ------------------------------------------------------------------------------------------------ supervisor -> worker
class LoadModel(msgspec.Struct, frozen=True):
    """Load this package as this generation; on an idle board or after `UnloadModel`."""

    seq: int
    generation: int
    alias: str
    package: str
    """Absolute path of the package folder."""
    digest: str
    """What the manifest's sha256 must be; empty: whatever the package proves to be."""


class UnloadModel(msgspec.Struct, frozen=True):
    """Drain until the deadline, then unload."""

    seq: int
    generation: int
    deadline_ms: int


class DrainBoard(msgspec.Struct, frozen=True):
    """Refuse new requests, finish what runs. `calculet drain`."""

    seq: int


class ResumeBoard(msgspec.Struct, frozen=True):
    """Take requests again."""

    seq: int


class SetPingPong(msgspec.Struct, frozen=True):
    """An operator's word on two jobs in flight: as configured again, or one at a time. What was submitted drains."""

    seq: int
    allowed: bool


class GrantReset(msgspec.Struct, frozen=True):
    """A reset was paid for: reset, golden, and serve as `generation`."""

    seq: int
    generation: int


class DenyReset(msgspec.Struct, frozen=True):
    """The reset budget is spent: the board is condemned until an operator or the window says otherwise."""

    seq: int
    reason: str


class StopWorker(msgspec.Struct, frozen=True):
    """Drain until the deadline, then exit 0."""

    seq: int
    deadline_ms: int


class TakeConfiguration(msgspec.Struct, frozen=True):
    """To a worker or a router: read the configuration again, and take what can be taken live. `live` is the digest that it must
    have then; a file with another one is not taken."""

    version: int
    live: str


class RetireRouter(msgspec.Struct, frozen=True):
    """To a router: end after its drain, so that whoever keeps it starts it again, with what it takes only at its start. Said twice
    it is the same."""


class Disturb(msgspec.Struct, frozen=True):
    """To a worker or a router: carry this fault until then. Ignored by a process whose configuration does not allow chaos."""

    order: str
    fault: AnyFault
    until_ns: int
    """CLOCK_MONOTONIC."""


# ------------------------------------------------------------------------------------------------ supervisor <-> router
BUCKETS_PER_OCTAVE = 8


def bucket_of(ms: float) -> int:
    """The bucket of a time: an eighth of an octave wide (9 %), from a microsecond up."""
    return max(0, math.ceil(BUCKETS_PER_OCTAVE * math.log2(max(ms, 1e-9) * 1000)))


def bucket_ms(bucket: int) -> float:
    """The bucket's upper bound, in milliseconds."""
    return float(2 ** (bucket / BUCKETS_PER_OCTAVE)) / 1000


class VersionReport(msgspec.Struct, frozen=True):
    """What a router has counted of one artifact since it started; times in buckets (`bucket_of`)."""

    digest: str
    requests: int = 0
    failed: int = 0
    """With what a server can be blamed for: 5xx."""
    first: dict[int, int] = {}
    """Accepted to first token."""
    between: dict[int, int] = {}
    """Between tokens, the mean of an answer."""


class ModelWait(msgspec.Struct, array_like=True, frozen=True):
    """Requests that wait for a model whose board serves another one."""

    count: int
    oldest_ns: int
    """Since when the first of them waits, CLOCK_MONOTONIC of the host."""


class RouterReport(msgspec.Struct, frozen=True):
    """A router's heartbeat and the acknowledgement of a view."""

    router: int
    pid: int
    protocol: int
    view_version: int
    url: str = ""
    inflight: int = 0
    requests: int = 0
    failed: int = 0
    resent: int = 0
    rss_bytes: int = 0
    links: dict[str, str] = {}
    """Board name -> `up`, `connecting`, `suspect`."""
    versions: list[VersionReport] = []
    """Only while more than one artifact has been served lately."""
    waiting: dict[str, ModelWait] = {}
    """By alias: what waits for its turn on a time-shared board."""
    config_start: str = ""
    """As a worker's; likewise the next two."""
    config_live: str = ""
    config_error: str | None = None
    serves: dict[str, int] | None = None
    """Board name -> the generation that this router would send a request to; None: it does not say (it takes no requests yet)."""
    name: str = ""
    """Of its journal, log and metrics."""
    began_s: float = 0.0
    """When its process began, UTC seconds; 0: it does not say."""
    draining: bool = False
    """It takes nobody new and ends."""


class BoardView(msgspec.Struct, frozen=True):
    """One board as routers see it. Only boards with a live worker are listed."""

    board: str
    epoch: int
    pid: int
    endpoint: str
    state: str
    """Name of a `ModelState`; requests go to `READY` boards that are not draining."""
    generation: int
    digest: str
    alias: str
    draining: bool = False
    weight: float = 1.0
    pool: str = ""
    """`latency`, `throughput`, or empty: for everybody."""


class AliasView(msgspec.Struct, frozen=True):
    """What one alias serves."""

    alias: str
    digest: str
    max_model_len: int
    created: int
    """Seconds since 1970, for `/v1/models`."""
    calbin_sha256: str = ""
    profiles: list[int] = []
    capability: str = ""
    """The level that the artifact has evidence for, for example `C0`."""
    backend: str = ""
    artifact: str = ""
    """`name version`."""
    temperature: float | None = None
    """For requests that ask for none; likewise `top_p`. None: the interface's own default."""
    top_p: float | None = None
    other: AliasView | None = None
    """A second artifact of the same alias, while a swap is under way: `share` of new requests go to it."""
    share: float = 0.0
    parks: int = 0
    """How many requests may wait for it at a router while another model has its board; 0: none, it has boards of its own."""


class FleetView(msgspec.Struct, frozen=True):
    """The routers' whole knowledge; versions only grow. Also the content of the fleet-view file, as JSON."""

    version: int
    boards: list[BoardView] = []
    aliases: list[AliasView] = []


Message = (
    RouterHello | Submit | Cancel | Lease | WorkerHello | Tick | WorkerReport | LoadModel | UnloadModel | DrainBoard
    | ResumeBoard | SetPingPong | GrantReset | DenyReset | StopWorker | RouterReport | FleetView | Lookup | LookupAnswer
    | Disturb | TakeConfiguration | RetireRouter
)  # fmt: skip

KINDS: dict[bytes, type[Any]] = {
    b"rh": RouterHello,
    b"su": Submit,
    b"ca": Cancel,
    b"le": Lease,
    b"wh": WorkerHello,
    b"ti": Tick,
    b"wr": WorkerReport,
    b"lm": LoadModel,
    b"um": UnloadModel,
    b"db": DrainBoard,
    b"rb": ResumeBoard,
    b"gr": GrantReset,
    b"dr": DenyReset,
    b"st": StopWorker,
    b"pp": SetPingPong,
    b"rr": RouterReport,
    b"lu": Lookup,
    b"la": LookupAnswer,
    b"fv": FleetView,
    b"di": Disturb,
    b"tc": TakeConfiguration,
    b"re": RetireRouter,
}

_KIND_OF: dict[type[Any], bytes] = {cls: kind for kind, cls in KINDS.items()}
_DECODE = {kind: msgspec.msgpack.Decoder(cls).decode for kind, cls in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> list[bytes]:
    """[kind, body], ready for `send_multipart`."""
    return [_KIND_OF[type(message)], _encode(message)]


def decode(kind: bytes, body: bytes | memoryview) -> Message:
    """The message of two frames.

    Raises:
        WireError: unknown kind, malformed MessagePack, a missing field or a wrong type.
    """
    try:
        message: Message = _DECODE[kind](body)
    except KeyError:
        raise WireError(f"unknown message kind {kind[:16]!r}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise WireError(f"{KINDS[kind].__name__}: {error}") from None
    return message
