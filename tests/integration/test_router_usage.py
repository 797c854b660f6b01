"""One usage record for each request that was let in, whatever became of its client or its router."""

from __future__ import annotations

import json
from pathlib import Path

from builders_fleet import Fleet, Packages
from builders_fleet import until as wait_until
from builders_router import HttpClient, until
from builders_stage import CHAT, PATH, STREAM, Stage, accepts, says

from calculet_core import wire
from calculet_core.shell.usage import read_usage
from calculet_core.usage import UsageRecord


def records(stage: Stage) -> list[UsageRecord]:
    return list(read_usage(stage.folder / "state" / "usage"))


def test_completed_failed_and_left_requests_are_recorded_and_refused_ones_are_not(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker)
        whole, leaver, failing = [await HttpClient.connect(router.port) for _ in range(3)]
        whole.post(PATH, {**CHAT, "n": 2}, "x-request-id: mine")
        await until(lambda: len(worker.submits) == 2)
        leaver.post(PATH, STREAM)
        await until(lambda: len(worker.submits) == 3)
        failing.post(PATH, STREAM)
        await until(lambda: len(worker.submits) == 4)
        for submit in worker.submits[:2]:
            worker.answer(submit, "a", "b")
        assert (await whole.response())[0] == 200
        worker.piece(worker.submits[2], "one", 1)
        worker.piece(worker.submits[2], "two", 4)
        await leaver.head()
        while b"two" not in await leaver.chunk():
            pass
        leaver.close()
        await until(lambda: worker.cancels)
        worker.piece(worker.submits[3], "x")
        await failing.head()
        worker.piece(worker.submits[3], "", 0, error=worker_error(), usage=usage(3, 9))
        assert b"bad_output" in b"".join([chunk async for chunk in failing.chunks()])
        refused = await HttpClient.connect(router.port)
        refused.post(PATH, {**CHAT, "model": "nowhere"})
        assert (await refused.response())[0] == 404
        await until(lambda: len(records(stage)) == 3)
        found = {record.outcome: record for record in records(stage)}
        done, left, failed = found["completed"], found["cancelled"], found["failed"]
        assert (done.prompt_tokens, done.generated_tokens, done.choices, done.label) == (3, 4, 2, "mine")
        assert (left.prompt_tokens, left.generated_tokens, left.tenant, left.key) == (3, 5, "default", None)
        assert (failed.generated_tokens, failed.code) == (9, "bad_output")

    stage.play(scene)


def worker_error() -> wire.ErrorInfo:
    return wire.ErrorInfo("bad_output", "NaN")


def usage(prompt: int, generated: int) -> wire.Usage:
    return wire.Usage(prompt, generated)


def test_what_ended_before_the_last_moment_survives_kill_nine(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(on_submit=says("ok")))
        client = await HttpClient.connect(router.port)
        for _ in range(20):
            client.post(PATH, CHAT)
            assert (await client.response())[0] == 200
        await until(lambda: len(records(stage)) == 20, deadline_s=20)
        router.kill()
        assert len(records(stage)) == 20

    stage.play(scene)


def test_sigterm_writes_everything(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(on_submit=says("ok")))
        client = await HttpClient.connect(router.port)
        client.post(PATH, CHAT)
        assert (await client.response())[0] == 200
        router.terminate()
        assert await router.ended() == 0
        assert [record.outcome for record in records(stage)] == ["completed"]

    stage.play(scene)


def test_tokens_of_a_killed_routers_open_requests_are_recovered_and_shown(tmp_path: Path, packages: Packages) -> None:
    package = packages.get("sim-batch", "--step-ms", "5")
    sections = {"tenants": [{"name": "default"}, {"name": "red"}], "router": {"lease_interval_ms": 200}}
    with Fleet(tmp_path / "fleet", package, packages.key.with_suffix(".pub"), **sections) as fleet:  # type: ignore[arg-type]
        assert fleet.completion("short", max_tokens=4).status == 200
        stream = fleet.stream({"prompt": "long", "max_tokens": 3000})
        for _ in range(10):
            next(stream)
        journal = fleet.folder / "log" / "router.jsonl"
        wait_until(lambda: journal.read_bytes().count(b'"request.accepted"') == 2, "the router's journal is flushed")
        folder = fleet.folder / "state" / "usage"
        wait_until(lambda: len(list(read_usage(folder))) == 1, "the ended request's record is on disk")
        fleet.kill("router")
        wait_until(lambda: len(list(read_usage(folder))) == 2, "the open request's record")
        short, lost = read_usage(folder)
        assert (short.outcome, short.generated_tokens, short.recovered) == ("completed", 4, False)
        assert (lost.outcome, lost.code, lost.recovered) == ("failed", "router_lost", True)
        assert lost.prompt_tokens == 4 and lost.generated_tokens >= 10
        shown = fleet.cli("usage", "--json", "--by", "tenant")
        assert shown.returncode == 0, shown.stderr
        (row,) = json.loads(shown.stdout)["rows"]
        assert (row["tenant"], row["requests"], row["recovered"]) == ("default", 2, 1)
        assert row["generated_tokens"] == 4 + lost.generated_tokens
        table = fleet.cli("usage", "--by", "day", "--by", "model")
        assert table.returncode == 0 and "toy" in table.stdout and "router killed" in table.stderr
        lines = fleet.cli("usage", "--records", "--tenant", "default").stdout.splitlines()
        assert [json.loads(line)["request"] for line in lines] == [short.request, lost.request]
        assert fleet.cli("usage", "--from", "2026-13-01").returncode == 2
        assert "no request ended" in fleet.cli("usage", "--from", "2020-01-01", "--to", "2020-01-02").stdout
