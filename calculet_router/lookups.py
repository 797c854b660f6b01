"""`/tokenize` and `/detokenize`: parsed here, answered by any worker that has the model.

A question is pure, so it goes to another worker when its own is lost or says that it has another artifact by now; after
`MAX_TRIES` workers, or in the end in time, it fails. Their number is bounded, since they share the workers' tokenizing threads with
requests, and a tenant's rate counts them like calls.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from calculet_core.clock import MS
from calculet_core.config import RouterConfig
from calculet_core.errors import CalculetError, InvalidValue, NoReadyWorker, OverCapacity, Unsupported, error_from_code
from calculet_core.requests import MAX_LOOKUP_TOKENS, Prompt
from calculet_core.wire import AliasView, Lookup
from calculet_router import actions, events
from calculet_router.aliases import Aliases
from calculet_router.fleet import Roster, Worker
from calculet_router.openai import Message, Model, TokenId, decode_body, plain_messages
from calculet_router.tenants import Tenants
from calculet_router.tools import Tool, object_text, told_tools

MAX_TRIES = 3


class Question(msgspec.Struct, frozen=True):
    """A validated body: a prompt to encode, or ids to decode."""

    model: str
    prompt: Prompt | None = None
    token_ids: tuple[int, ...] = ()
    want_pieces: bool = False


class TokenizeRequest(msgspec.Struct):
    """`POST /tokenize`: `prompt` or `messages`."""

    model: Model
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    """With messages: as in a chat."""
    return_token_strs: bool | None = None
    """Also each token's text."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """With messages: as in a chat."""


class DetokenizeRequest(msgspec.Struct):
    """`POST /detokenize`."""

    model: Model
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_LOOKUP_TOKENS)]


_decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode
_decode_detokenize = msgspec.json.Decoder(DetokenizeRequest).decode
_encode = msgspec.json.Encoder().encode


def parse_tokenize(body: bytes) -> Question:
    """A body of `/tokenize`.

    Raises:
        CalculetError: InvalidJson, or InvalidValue or Unsupported with `param` set.
    """
    asked: TokenizeRequest = decode_body(_decode_tokenize, body)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidValue("one of prompt and messages is needed, and not both", param="prompt")
    if asked.messages is None:
        return Question(asked.model, Prompt(text=asked.prompt), want_pieces=bool(asked.return_token_strs))
    if asked.add_generation_prompt is False:
        raise Unsupported("add_generation_prompt: false is not supported", param="add_generation_prompt")
    options = object_text(asked.chat_template_kwargs, "chat_template_kwargs")
    prompt = Prompt(messages=plain_messages(asked.messages), tools=told_tools(asked.tools or []), options=options)
    return Question(asked.model, prompt, want_pieces=bool(asked.return_token_strs))


def parse_detokenize(body: bytes) -> Question:
    """A body of `/detokenize`.

    Raises:
        CalculetError: InvalidJson, or InvalidValue with `param` set.
    """
    asked: DetokenizeRequest = decode_body(_decode_detokenize, body)
    return Question(asked.model, token_ids=tuple(asked.tokens))


class Pending(msgspec.Struct, eq=False):
    """A question on its way."""

    owner: Any
    question: Question
    alias: AliasView
    deadline_ns: int
    key: tuple[str, int] = ("", 0)
    """Board and epoch of the worker that was asked."""
    tried: list[tuple[str, int]] = []


class Lookups:
    """All questions; `roster` and `aliases` are read only."""

    def __init__(self, config: RouterConfig, roster: Roster, aliases: Aliases, tenants: Tenants) -> None:
        self.take_config(config)
        self._roster, self._aliases, self._tenants = roster, aliases, tenants
        self._pending: dict[int, Pending] = {}
        self._counter = self._turn = 0

    def take_config(self, config: RouterConfig) -> None:
        """Limits, from now on."""
        self._limit, self._timeout_ns = config.max_lookups, config.lookup_timeout_ms * MS

    def __len__(self) -> int:
        """Questions that have no answer yet."""
        return len(self._pending)

    def handle(self, event: events.Event, now_ns: int) -> list[actions.Action]:
        """Decide; events that are not for questions do nothing."""
        out: list[actions.Action] = []
        if isinstance(event, events.LookupAsked):
            self._asked(event, now_ns, out)
        elif isinstance(event, events.LookupAnswered):
            self._answered(event, out)
        elif isinstance(event, events.WorkerEnded):
            for number, pending in list(self._pending.items()):
                if pending.key == (event.board, event.epoch):
                    self._again(number, pending, NoReadyWorker(f"the worker of {event.board} {event.reason}"), out)
        elif isinstance(event, events.Overslept):
            for pending in self._pending.values():
                pending.deadline_ns += event.by_ns
        elif isinstance(event, events.TimePassed):
            for number, pending in list(self._pending.items()):
                if now_ns >= pending.deadline_ns:
                    del self._pending[number]
                    out.append(actions.Fail(pending.owner, NoReadyWorker(f"{pending.key[0]} did not answer in time")))
        return out

    def _asked(self, event: events.LookupAsked, now_ns: int, out: list[actions.Action]) -> None:
        question, tenant = event.question, event.identity.tenant
        error = self._tenants.forbids(tenant, question.model)
        alias = self._aliases.resolve(question.model)
        if error is None and isinstance(alias, CalculetError):
            error = alias
        if error is None and len(self._pending) >= self._limit:
            error = OverCapacity(f"{len(self._pending)} of {self._limit} questions about tokens are open (router.max_lookups)")
        error = error or self._tenants.take_rate(tenant, now_ns)
        if error is not None:
            out.append(actions.Fail(event.owner, error))
            return
        assert not isinstance(alias, CalculetError)
        self._counter += 1
        self._send(self._counter, Pending(event.owner, question, alias, now_ns + self._timeout_ns), None, out)

    def _send(self, number: int, pending: Pending, last: CalculetError | None, out: list[actions.Action]) -> None:
        worker = self._choose(pending) if len(pending.tried) < MAX_TRIES else None
        if worker is None:
            self._pending.pop(number, None)
            name = pending.question.model
            out.append(actions.Fail(pending.owner, last or NoReadyWorker(f"no worker is ready to serve {name!r}")))
            return
        pending.key = worker.key
        pending.tried = [*pending.tried, worker.key]
        self._pending[number] = pending
        question = pending.question
        message = Lookup(number, worker.epoch, worker.view.digest, question.prompt, question.token_ids, question.want_pieces)
        out.append(actions.Send(worker.board, worker.epoch, message))

    def _choose(self, pending: Pending) -> Worker | None:
        """In turn: a question costs the same everywhere. While an alias has two artifacts, the other one's boards come last."""
        views = [pending.alias, *self._aliases.versions(pending.alias.alias)]
        eligible = next((found for view in views if (found := self._roster.eligible(view.alias, view.digest))), [])
        fresh = [worker for worker in eligible if worker.key not in pending.tried]
        self._turn += 1
        return fresh[self._turn % len(fresh)] if fresh else None

    def _again(self, number: int, pending: Pending, error: CalculetError, out: list[actions.Action]) -> None:
        self._send(number, pending, error, out)

    def _answered(self, event: events.LookupAnswered, out: list[actions.Action]) -> None:
        answer = event.answer
        pending = self._pending.get(answer.request_id)
        if pending is None or pending.key != (event.board, event.epoch):
            out.append(actions.Ignored("late", 1))
            return
        if answer.error is not None:
            info = answer.error
            error = error_from_code(info.code, info.message, info.param, info.retry_after_s)
            if error.retryable:
                self._again(answer.request_id, pending, error, out)
                return
            found: actions.Action = actions.Fail(pending.owner, error)
        elif pending.question.prompt is None:
            found = actions.Told(pending.owner, _encode({"prompt": answer.text or ""}))
        else:
            body: dict[str, Any] = {
                "count": len(answer.token_ids), "max_model_len": pending.alias.max_model_len, "tokens": answer.token_ids,
            }  # fmt: skip
            if answer.pieces is not None:
                body["token_strs"] = [piece.decode(errors="replace") for piece in answer.pieces]
            found = actions.Told(pending.owner, _encode(body))
        del self._pending[answer.request_id]
        out.append(found)
