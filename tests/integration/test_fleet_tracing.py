"""Spans of a real fleet at a collector: one trace through client, router and worker, also when the worker dies on the way."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator

import pytest
from builders_collector import Collector, a_collector
from builders_fleet import Fleet, Packages, until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with a_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages, collector: Collector) -> Iterator[Fleet]:
    tracing = {"endpoint": collector.url, "interval_ms": 50, "timeout_ms": 1000, "jobs": True}
    package, trust = packages.get("sim-batch", "--step-ms", "5"), packages.key.with_suffix(".pub")
    with Fleet(
        tmp_path_factory.mktemp("traced"), package, trust, tracing=tracing, journal={"max_bytes": 33_554_432, "keep": 3}
    ) as fleet:
        yield fleet


def metric(fleet: Fleet, name: str, process: str) -> float:
    line = f'{name}{{process="{process}"}} '
    return next(
        (float(one.removeprefix(line)) for one in fleet.get("/metrics").body.decode().splitlines() if one.startswith(line)), 0.0
    )


def test_a_clients_trace_goes_through_router_and_worker_and_comes_back(fleet: Fleet, collector: Collector) -> None:
    answer = fleet.post(
        "/v1/completions",
        {"model": "toy", "prompt": "Hello", "max_tokens": 6, "temperature": 0},
        traceparent=f"00-{TRACE}-{PARENT}-01",
    )
    assert answer.status == 200
    until(lambda: {"request", "attempt", "serve", "decode"} <= set(collector.named(TRACE)), "the spans arrive")
    named = collector.named(TRACE)
    (request,), (attempt,), (serve,), (prefill,) = (named[name] for name in ("request", "attempt", "serve", "prefill"))
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.span_id}-01"
    assert (request.parent, request.service, request.kind) == (PARENT, "calculet-router", "server")
    assert (attempt.parent, serve.parent, prefill.parent) == (request.span_id, attempt.span_id, serve.span_id)
    assert (serve.service, serve.attributes["gen_ai.usage.output_tokens"]) == ("calculet-worker", 6)
    assert serve.instance.startswith(f"{attempt.attributes['calculet.board']}/")
    until(lambda: len(collector.named(TRACE)["job decode"]) >= 5, "a span for each step")
    assert {job.parent for job in collector.named(TRACE)["job decode"]} == {named["decode"][0].span_id}
    assert request.start_ns <= serve.start_ns <= prefill.start_ns <= serve.end_ns <= request.end_ns + 50_000_000
    assert request.attributes["calculet.request_id"] == answer.headers["x-request-id"]


def test_journals_and_explain_join_by_the_trace(fleet: Fleet) -> None:
    def journaled(name: str) -> bool:
        return f'"trace":"{TRACE}"' in (fleet.folder / "log" / name).read_text()

    until(
        lambda: journaled("router.jsonl") and (journaled("worker-board0.jsonl") or journaled("worker-board1.jsonl")),
        "journals name the trace",
    )
    for asked in (TRACE, f"00-{TRACE}-{PARENT}-01"):
        told = fleet.cli("explain", asked)
        assert told.returncode == 0 and f", trace {TRACE}: completed" in told.stdout, told.stdout + told.stderr


def test_a_request_without_a_context_gets_a_trace_and_one_that_is_not_sampled_no_spans(fleet: Fleet, collector: Collector) -> None:
    body = {"model": "toy", "prompt": "Hello", "max_tokens": 2}
    own = fleet.post("/v1/completions", body).headers["traceparent"].split("-")
    unsampled = "1" * 32
    quiet = fleet.post("/v1/completions", body, traceparent=f"00-{unsampled}-{PARENT}-00").headers["traceparent"]
    assert quiet.startswith(f"00-{unsampled}-") and quiet.endswith("-00") and PARENT not in quiet
    until(lambda: "request" in collector.named(own[1]), "its span arrives")
    assert collector.named(own[1])["request"][0].parent == "" and collector.trace(unsampled) == []


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "model"),
    [
        (b'{"model":"toy","prompt":5}', {}, 400, "invalid_value", None),
        (b"{", {}, 400, "invalid_json", None),
        (b'{"model":"toy","prompt":"x"}', {"content-encoding": "gzip"}, 415, "unsupported_media_type", None),
        (b'{"model":"toy","prompt":"x"}', {"x-request-timeout-ms": "soon"}, 400, "invalid_value", None),
        (b'{"model":"nowhere","prompt":"x"}', {}, 404, "model_not_found", "nowhere"),
        (b'{"model":"toy","prompt":[999999]}', {}, 400, "invalid_value", "toy"),
    ],
)
def test_a_refused_request_has_a_span_with_its_error(
    fleet: Fleet, collector: Collector, body: bytes, headers: dict[str, str], status: int, code: str, model: str | None
) -> None:
    def ask(flags: str) -> str:
        trace_id = secrets.token_hex(16)
        told = {"traceparent": f"00-{trace_id}-{PARENT}-{flags}", "x-request-id": "night-shift", **headers}
        answer = fleet.post("/v1/completions", body, **told)
        assert answer.status == status and answer.headers["traceparent"].startswith(f"00-{trace_id}-"), answer.body
        return trace_id

    silent, trace_id = ask("00"), ask("01")
    until(lambda: "request" in collector.named(trace_id), "the span arrives")
    (span,) = collector.named(trace_id)["request"]
    assert (span.error, span.attributes["error.type"], span.parent, span.kind) == (code, code, PARENT, "server")
    assert (span.attributes.get("gen_ai.request.model"), span.attributes["calculet.label"]) == (model, "night-shift")
    assert span.start_ns <= span.end_ns and span.attributes["calculet.tenant"] == "default"
    assert not collector.trace(silent), "its client did not want it recorded"


def test_a_killed_worker_shows_as_a_failed_attempt_of_a_good_request(fleet: Fleet, collector: Collector) -> None:
    trace = "2" * 32
    answers = []

    def ask() -> None:
        answers.append(
            fleet.post(
                "/v1/completions", {"model": "toy", "prompt": "Hello", "max_tokens": 300}, traceparent=f"00-{trace}-{PARENT}-01"
            )
        )

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    until(lambda: all(fleet.active()), "both boards have some")
    fleet.kill("worker", "board0")
    for client in clients:
        client.join()
    assert [answer.status for answer in answers] == [200] * 4
    until(lambda: len(collector.named(trace).get("request", [])) == 4, "all spans arrive")
    named = collector.named(trace)
    lost = [span for span in named["attempt"] if span.error == "worker_lost"]
    assert lost and {span.attributes["calculet.board"] for span in lost} == {"board0"}
    assert [span.error for span in named["request"]] == [None] * 4 and len(named["attempt"]) == 4 + len(lost)
    fleet.wait_ready(2)


def test_a_collector_that_refuses_costs_spans_and_no_request(fleet: Fleet, collector: Collector) -> None:
    before, exported = (
        metric(fleet, "calculet_process_spans_lost_total", "router"),
        metric(fleet, "calculet_process_spans_exported_total", "router"),
    )
    assert exported > 0
    collector.status = 400
    assert fleet.completion(max_tokens=2).status == 200
    until(lambda: metric(fleet, "calculet_process_spans_lost_total", "router") > before, "the loss is counted")
    collector.status = 200
    assert fleet.completion(max_tokens=2).status == 200
    until(lambda: metric(fleet, "calculet_process_spans_exported_total", "router") > exported, "and then it goes on")
