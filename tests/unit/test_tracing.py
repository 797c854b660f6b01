"""Traces: W3C contexts in and out, spans that hang together however a request went, and a collector that nobody waits for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from builders_fleet import until
from builders_router import Desk, a_chat, a_hello

from calculet_core import history, wire
from calculet_core.clock import MS
from calculet_core.config import TracingConfig
from calculet_core.errors import ConfigError
from calculet_core.history import Event
from calculet_core.ids import WireKey
from calculet_core.jobs import EngineBank, JobKind, JobTimings
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_core.shell import spans as shell
from calculet_core.shell.spans import SpanSender, check_tracing
from calculet_core.tracing import Span, TraceContext, child_id, chosen, parse_traceparent, present
from calculet_router import actions, events
from calculet_router.spans import RouterSpans, attempt_span, refused_span
from calculet_worker.actions import TracedRow, TraceSteps
from calculet_worker.spans import WorkerSpans

TRACE, PARENT, OWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "b7ad6b7169203331"
CLIENTS = f"00-{TRACE}-{PARENT}-01"
CONTEXT = TraceContext(TRACE, OWN, True, PARENT, own=True)


# ---------------------------------------------------------------- contexts
def test_a_clients_context_is_read() -> None:
    assert parse_traceparent(CLIENTS.encode()) == TraceContext(TRACE, PARENT, True)
    assert parse_traceparent(f"00-{TRACE}-{PARENT}-00") == TraceContext(TRACE, PARENT, False)
    assert parse_traceparent(f" 00-{TRACE}-{PARENT}-03\t") == TraceContext(TRACE, PARENT, True)
    assert parse_traceparent(f"cc-{TRACE}-{PARENT}-01-what-a-later-version-says") == TraceContext(TRACE, PARENT, True)


@pytest.mark.parametrize(
    "header",
    [
        "", "junk", f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-more", f"00-{TRACE.upper()}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{PARENT}", f"00-{TRACE[1:]}-{PARENT}-01", f"0-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-zz",
        f"cc-{TRACE}-{PARENT}-01-" + "x" * 600, b"\xff\xfe\x00", f"00-{TRACE}-{PARENT}-01x",
    ],
)  # fmt: skip
def test_what_is_no_context_is_ignored(header: str | bytes) -> None:
    assert parse_traceparent(header) is None


def test_a_context_is_written_as_it_is_read() -> None:
    assert CONTEXT.text() == f"00-{TRACE}-{OWN}-01" and TraceContext(TRACE, PARENT, False).text() == f"00-{TRACE}-{PARENT}-00"
    assert parse_traceparent(CONTEXT.text(child_id("x"))) == TraceContext(TRACE, child_id("x"), True)


def test_ids_follow_from_what_they_belong_to() -> None:
    assert child_id("a", 1) == child_id("a", 1) != child_id("a", 2) and len(child_id("a")) == 16


def test_the_ratio_chooses_by_the_trace_id() -> None:
    ids = [f"{'0' * 16}{n * ((1 << 64) // 1000) + 2000:016x}" for n in range(1000)]
    assert [sum(chosen(one, ratio) for one in ids) for ratio in (0.0, 0.25, 1.0)] == [0, 250, 1000]


# ---------------------------------------------------------------- the router
def a_call(desk: Desk, trace: TraceContext | None, **fields: Any) -> Any:
    owner = f"call-{trace}-{fields}"
    desk.tell(events.CallArrived(owner, a_chat(**fields), 1_700_000_000, trace=trace))
    return owner


def submits(desk: Desk) -> list[wire.Submit]:
    return [one.message for one in desk.done if isinstance(one, actions.Send) and isinstance(one.message, wire.Submit)]


def ready(*boards: str) -> Desk:
    desk = Desk(*boards)
    for board in boards:
        desk.tell(events.HelloArrived(board, 1, a_hello(board)))
    desk.done.clear()
    return desk


def test_a_worker_gets_the_attempts_span_as_its_parent_and_the_client_its_trace() -> None:
    desk = ready("board0")
    a_call(desk, CONTEXT)
    (submit,) = submits(desk)
    assert submit.traceparent == f"00-{TRACE}-{attempt_span(OWN, submit.request_id, 1)}-01"
    ticket = next(one.ticket for one in desk.done if isinstance(one, actions.Opened))
    assert ticket.headers.startswith(f"traceparent: 00-{TRACE}-{OWN}-01\r\n".encode())
    accepted = next(one for one in desk.done if isinstance(one, Event))
    assert {name: accepted.data.get(name) for name in ("trace", "span", "parent")} == {
        "trace": TRACE,
        "span": OWN,
        "parent": PARENT,
    }


def test_without_spans_a_clients_trace_is_passed_on_as_it_came() -> None:
    desk = ready("board0")
    a_call(desk, parse_traceparent(CLIENTS))
    assert submits(desk)[0].traceparent == CLIENTS
    accepted = next(one for one in desk.done if isinstance(one, Event))
    assert accepted.data["trace"] == TRACE and "span" not in accepted.data


def test_a_call_without_a_trace_says_nothing_of_one() -> None:
    desk = ready("board0")
    a_call(desk, None)
    assert submits(desk)[0].traceparent is None
    assert next(one.ticket for one in desk.done if isinstance(one, actions.Opened)).headers == b""
    assert not {"trace", "span"} & set(next(one for one in desk.done if isinstance(one, Event)).data)


def test_the_field_is_the_last_so_that_older_peers_understand() -> None:
    assert wire.Submit.__struct_fields__.index("traceparent") > wire.Submit.__struct_fields__.index("echo")


def at(ms: float, event: str, request: int | None, attempt: int | None = None, board: str | None = None, **data: Any) -> Event:
    return Event(event, int(ms * MS), request, attempt, board, 1 if board else None, 7 if board else None, data=data)


def accepted(request: int, **data: Any) -> Event:
    return at(0, history.REQUEST_ACCEPTED, request, model="toy", tenant="t", trace=TRACE, span=OWN, parent=PARENT, **data)


def told(*happened: Event) -> tuple[RouterSpans, list[Span]]:
    spans = RouterSpans()
    return spans, [span for event in happened for span in spans.see(event)]


def test_a_request_that_was_sent_twice_has_two_attempts_below_it() -> None:
    spans, found = told(
        accepted(1, label="mine"),
        at(1, history.REQUEST_SENT, 1, 1, "board0"),
        at(5, history.REQUEST_TROUBLE, 1, 1, "board0", reason="worker_lost", code="worker_lost"),
        at(5, history.REQUEST_SENT, 1, 2, "board1"),
        at(9, history.REQUEST_TOKENS, 1, 2, n=3),
        at(9, history.REQUEST_DONE, 1, 2, outcome="completed", prompt_tokens=4, tokens=3),
    )
    first, second, whole = found
    assert (first.name, first.error, first.start_ns, first.end_ns) == ("attempt", "worker_lost", 1 * MS, 5 * MS)
    assert (second.error, second.attributes["calculet.board"], second.kind) == (None, "board1", "client")
    assert {first.parent, second.parent} == {OWN} and first.span_id != second.span_id == attempt_span(OWN, 1, 2)
    assert (whole.span_id, whole.parent, whole.kind, whole.error, whole.start_ns, whole.end_ns) == (
        OWN,
        PARENT,
        "server",
        None,
        0,
        9 * MS,
    )
    assert whole.attributes == {
        "gen_ai.request.model": "toy", "gen_ai.usage.input_tokens": 4, "gen_ai.usage.output_tokens": 3, "calculet.request_id": f"{1:016x}",
        "calculet.tenant": "t", "calculet.label": "mine", "calculet.choices": 1, "calculet.attempts": 2, "calculet.outcome": "completed",
    }  # fmt: skip
    assert spans.open == 0 and not spans._of


def test_choices_share_one_span_that_ends_with_the_last() -> None:
    spans, found = told(
        accepted(1), accepted(2, choice=1), at(0, history.REQUEST_SENT, 1, 1, "b"), at(0, history.REQUEST_SENT, 2, 1, "b"),
        at(3, history.REQUEST_DONE, 1, 1, outcome="completed", prompt_tokens=4, tokens=3),
        at(8, history.REQUEST_DONE, 2, 1, outcome="failed", prompt_tokens=4, tokens=1, code="worker_lost"),
    )  # fmt: skip
    assert [span.name for span in found] == ["attempt", "attempt", "request"] and spans.open == 0
    assert (found[2].end_ns, found[2].error, found[2].attributes["gen_ai.usage.output_tokens"]) == (8 * MS, "worker_lost", 4)


def test_a_call_refused_at_the_door_keeps_its_trace_for_the_one_span_it_gets() -> None:
    desk, trace = ready(), TraceContext(TRACE, "aa" * 8, True, "bb" * 8, own=True)
    a_call(desk, trace)
    (ended,) = [one for one in desk.done if isinstance(one, actions.Ended)]
    assert ended.error is not None and (ended.request, ended.trace) == (None, trace)
    span = refused_span(trace, ended.error, 5, 9, "qwen3", "default", None)
    assert (span.trace_id, span.span_id, span.parent, span.start_ns, span.end_ns) == (TRACE, "aa" * 8, "bb" * 8, 5, 9)
    assert span.error == ended.error.code == span.attributes["error.type"]
    assert span.attributes["http.response.status_code"] == ended.error.http_status and "calculet.label" not in span.attributes


def test_requests_that_are_not_traced_make_no_spans_and_are_not_remembered() -> None:
    spans, found = told(
        at(0, history.REQUEST_ACCEPTED, 1, model="toy", tenant="t", trace=TRACE), at(1, history.REQUEST_SENT, 1, 1, "b"),
        at(9, history.REQUEST_DONE, 1, 1, outcome="completed", prompt_tokens=4, tokens=3), at(9, history.REQUEST_DONE, None),
    )  # fmt: skip
    assert found == [] and spans.open == 0


# ---------------------------------------------------------------- the worker
def a_submit(request: int = 1, epoch: int = 3, traceparent: str | None = CLIENTS) -> wire.Submit:
    return wire.Submit(
        request, 1, epoch, 7, "d", "toy", "t", 1.0, Prompt(text="x"), 4, SamplingParams(), StopRules(), 0, False, 0, traceparent=traceparent
    )  # fmt: skip


def a_board(jobs: bool = False, most: int = 10) -> WorkerSpans:
    spans = WorkerSpans("board0", 3, most, jobs)
    assert spans.arrived(a_submit(), 10 * MS) is False
    return spans


def run(spans: WorkerSpans, *happened: Event) -> dict[str, Span]:
    return {span.name: span for event in happened for span in spans.see(event)}


ADMITTED = at(14, history.ATTEMPT_ADMITTED, 1, 1, "board0", lane=2, wait_ns=3 * MS, queued=True)
FIRST = at(20, history.ATTEMPT_TOKENS, 1, 1, "board0", n=1)
REST = at(50, history.ATTEMPT_TOKENS, 1, 1, "board0", n=3)
DONE = at(50, history.ATTEMPT_DONE, 1, 1, "board0", outcome="completed", tenant="t", prompt_tokens=9, tokens=4)


def test_an_attempt_is_queued_prefilled_and_decoded_without_a_gap() -> None:
    spans = a_board()
    assert spans.trace_of(ADMITTED) == TRACE
    found = run(spans, ADMITTED, FIRST, REST, DONE)
    assert {name: (span.start_ns // MS, span.end_ns // MS) for name, span in found.items()} == {
        "queue": (10, 14), "prefill": (14, 20), "decode": (20, 50), "serve": (10, 50),
    }  # fmt: skip
    serve = found["serve"]
    assert (serve.parent, serve.kind, serve.trace_id, serve.error) == (PARENT, "server", TRACE, None)
    assert {found[name].parent for name in ("queue", "prefill", "decode")} == {serve.span_id}
    assert serve.attributes["calculet.lane"] == 2 and serve.attributes["gen_ai.usage.output_tokens"] == 4
    assert spans.open == 0 and spans.trace_of(DONE) is None


@pytest.mark.parametrize(
    ("happened", "phases"),
    [
        ([], {"queue", "serve"}),
        ([ADMITTED], {"queue", "prefill", "serve"}),
        ([ADMITTED, FIRST], {"queue", "prefill", "decode", "serve"}),
    ],
)
def test_an_attempt_that_fails_ends_the_phase_it_was_in(happened: list[Event], phases: set[str]) -> None:
    spans = a_board()
    found = run(spans, *happened, at(30, history.ATTEMPT_DONE, 1, 1, "board0", outcome="failed", code="model_recovering"))
    assert set(found) == phases and found["serve"].error == "model_recovering" and spans.open == 0
    assert max(span.end_ns for span in found.values()) == 30 * MS


@pytest.mark.parametrize(
    "submit", [a_submit(traceparent=None), a_submit(traceparent=CLIENTS[:-1] + "0"), a_submit(epoch=2), a_submit(traceparent="x")]
)
def test_what_is_not_sampled_or_not_for_this_life_is_not_followed(submit: wire.Submit) -> None:
    spans = WorkerSpans("board0", 3, 10)
    assert spans.arrived(submit, 0) is False and spans.open == 0 and run(spans, ADMITTED, DONE) == {}


def test_attempts_that_never_end_are_given_up_one_by_one() -> None:
    spans = WorkerSpans("board0", 3, 2)
    assert [spans.arrived(a_submit(request), 0) for request in (1, 2, 3)] == [False, False, True]
    assert spans.open == 2 and run(spans, ADMITTED) == {}


def steps(kind: JobKind, job: int, status: str = "done") -> TraceSteps:
    row = TracedRow(WireKey(1, 1, 3), 5, 0 if kind is JobKind.PREFILL else 1, 0, 0, 0, 9, 10, True)
    other = TracedRow(WireKey(77, 1, 3), 6, 4, 0, 0, 0, 9, 10, True)
    return TraceSteps(job, 7, kind, EngineBank.AUTO, status, JobTimings(), 4, 30 * MS, 33 * MS, 34 * MS, MS, [row, other])


def test_jobs_hang_below_their_phase_even_the_last_which_is_told_after_the_end() -> None:
    spans = a_board(jobs=True)
    found = run(spans, ADMITTED, FIRST)
    (prefill,) = spans.job(steps(JobKind.PREFILL, 8))
    assert (prefill.name, prefill.parent, prefill.start_ns, prefill.end_ns) == (
        "job prefill",
        found["prefill"].span_id,
        30 * MS,
        35 * MS,
    )
    found |= run(spans, DONE)
    (last,) = spans.job(steps(JobKind.DECODE, 9, "error"))
    assert last.parent == found["decode"].span_id and last.attributes["calculet.batch.active"] == 2 and last.error == "error"
    assert spans.job(steps(JobKind.DECODE, 10)) == [] and not spans._ended


def test_attributes_that_nobody_knows_are_left_out() -> None:
    assert present(a_b=1, gen__ai_x=0, none=None) == {"a.b": 1, "gen_ai.x": 0}


# ---------------------------------------------------------------- sending
def a_span(number: int = 0) -> Span:
    return Span("x", TRACE, child_id(number), None, "internal", 0, 1)


def counts() -> tuple[int, int]:
    return SpanSender.exported_by_process, SpanSender.lost_by_process


def test_a_queue_that_is_full_drops_and_counts_and_nobody_waits() -> None:
    held, taken = threading.Event(), []
    exported, lost = counts()

    def slow(batch: Any) -> bool:
        assert held.wait(60)
        taken.extend(batch)
        return True

    sender = SpanSender(TracingConfig(endpoint="http://c", max_queue=4, batch=1, interval_ms=1), slow)
    sender.add([a_span()])
    until(lambda: not sender._queue, "the first is being sent")
    sender.add([a_span(number) for number in range(10)])
    assert counts() == (exported, lost + 6) and SpanSender.queued_by_process == 4
    held.set()
    sender.close()
    assert len(taken) == 5 and counts() == (exported + 5, lost + 6) and SpanSender.queued_by_process == 0


def test_what_no_collector_takes_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    exported, lost = counts()
    answers: list[Any] = [False, OSError("gone"), True]

    def send(batch: Any) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    sender = SpanSender(TracingConfig(endpoint="http://c", batch=1, interval_ms=1), send)
    with caplog.at_level("INFO", "calculet.spans"):
        sender.add([a_span(1), a_span(2), a_span(3)])
        sender.close()
    assert counts() == (exported + 1, lost + 2)
    assert [record.getMessage().split("http://c ")[1] for record in caplog.records] == [
        "takes no spans; they are counted as lost",
        "takes spans again",
    ]


def test_off_starts_nothing_and_imports_nothing() -> None:
    before = threading.active_count()
    assert shell.open_sender(TracingConfig(), "x") is None and threading.active_count() == before


def test_without_the_extra_it_is_refused_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    check_tracing(TracingConfig())
    with pytest.raises(ConfigError, match=r"\$\.tracing\.endpoint: .*pip install 'calculet\[otel\]'"):
        check_tracing(TracingConfig(endpoint="http://127.0.0.1:4318"))
