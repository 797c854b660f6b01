"""API keys against a real router: made and ended by the CLI while it runs, and nowhere to be found afterwards."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from builders_router import HttpClient, RouterProcess, until
from builders_stage import CHAT, PATH, STREAM, Stage, accepts, error_of, metrics_of, says, value_of

from calculet_core.shell.keys import read_keys

TENANTS = [
    {"name": "default"},
    {"name": "red", "weight": 2.0, "max_active": 5},
    {"name": "slow", "requests_per_s": 0.01, "max_active": 5},
    {"name": "blue", "models": ["other"]},
]
MODELS = [{"alias": "qwen3", "package": "p", "boards": ["board0"]}, {"alias": "other", "package": "p", "boards": ["board1"]}]
SECTIONS: dict[str, Any] = {"tenants": TENANTS, "models": MODELS}
BOARDS = ("board0", "board1")


async def cli(router: RouterProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "calculet"), *arguments[:2], "--config", str(router.config), *arguments[2:]]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)


async def new_key(router: RouterProcess, tenant: str, *options: str) -> dict[str, Any]:
    done = await cli(router, "keys", "create", tenant, "--json", *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def ask(router: RouterProcess, key: str | None, body: dict[str, Any] = CHAT) -> tuple[int, dict[str, str], bytes]:
    client = await HttpClient.connect(router.port)
    client.post(PATH, body, *([f"authorization: Bearer {key}"] if key else []))
    answer = await client.response()
    client.close()
    return answer


async def serve(stage: Stage, **settings: Any) -> RouterProcess:
    return await stage.serve(
        stage.worker("board0", on_submit=says("ok")), stage.worker("board1", on_submit=says("ok")), sections=SECTIONS, **settings
    )


def test_keys_are_made_rotated_and_revoked_while_the_router_runs(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await serve(stage)
        assert (await ask(router, None))[0] == (await ask(router, "anything"))[0] == 200
        made = await cli(router, "keys", "create", "red", "--note", "laptop")
        assert made.returncode == 0 and made.stdout.startswith("ck-") and len(made.stdout.splitlines()) == 1
        assert "in force" in made.stderr and "first key" in made.stderr
        key = made.stdout.strip()
        key_id = key.split("-")[1]
        assert (await ask(router, key))[0] == 200
        for wrong in (None, "anything", key + "x", key[:-1]):
            status, headers, body = await ask(router, wrong)
            assert (status, error_of(body)["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        rotated = json.loads((await cli(router, "keys", "rotate", key_id, "--json")).stdout)
        assert rotated["tenant"] == "red" and rotated["key"] != key
        sent = [(submit.tenant, submit.weight) for worker in stage.workers for submit in worker.submits]
        assert sorted(sent) == [("default", 1.0), ("default", 1.0), ("red", 2.0)]
        assert (await ask(router, rotated["key"]))[0] == 200
        listed = json.loads((await cli(router, "keys", "list", "--json")).stdout)
        states = {one["id"]: (one["state"], one["note"], one["replaced_by"]) for one in listed["keys"]}
        assert states == {key_id: ("expiring", "laptop", rotated["id"]), rotated["id"]: ("active", "laptop", None)}
        ended = await cli(router, "keys", "revoke", key_id)
        assert ended.returncode == 0 and "in force" in ended.stderr
        assert (await ask(router, key))[0] == 401
        assert await value_of(router, "calculet_router_keys") == 1
        assert (await cli(router, "keys", "revoke", key_id)).returncode == 1
        unknown = await cli(router, "keys", "create", "green")
        assert unknown.returncode == 1 and "tenants: default, red, slow, blue" in unknown.stderr
        table = (await cli(router, "keys", "list", "--all")).stdout
        assert key_id in table and "revoked" in table and "laptop" in table

    stage.play(scene)


def test_a_tenant_is_held_to_its_rate_its_aliases_and_its_actives(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await serve(stage)
        slow_key, blue_key = (await new_key(router, "slow"))["key"], (await new_key(router, "blue"))["key"]
        status, headers, _ = await ask(router, slow_key)
        assert (status, headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (200, "1", "0")
        assert headers["x-ratelimit-limit-active"] == "5"
        status, headers, body = await ask(router, slow_key)
        assert (status, error_of(body)["code"]) == (429, "tenant_rate_limited")
        assert 80 <= int(headers["retry-after"]) <= 100 and headers["x-ratelimit-remaining-requests"] == "0"
        for model in ("qwen3", "nowhere"):
            status, _, body = await ask(router, blue_key, {**CHAT, "model": model})
            assert (status, error_of(body)["code"], error_of(body)["param"]) == (403, "permission_denied", "model")
        client = await HttpClient.connect(router.port)
        client.send(f"GET /v1/models HTTP/1.1\r\nauthorization: Bearer {blue_key}\r\n\r\n".encode())
        assert json.loads((await client.response())[2])["data"] == []
        client.get("/v1/models")
        assert (await client.response())[0] == 401
        client.get("/health")
        assert (await client.response())[0] == 200
        text = await metrics_of(router)
        assert 'calculet_router_tenant_refusals_total{code="tenant_rate_limited",tenant="slow"}' in text
        assert 'calculet_router_tenant_refusals_total{code="permission_denied",tenant="blue"} 2.0' in text
        assert 'calculet_router_tenant_tokens_total{kind="prompt",tenant="slow"}' in text
        assert await value_of(router, 'calculet_router_errors_total{code="invalid_api_key"}') == 1

    stage.play(scene)


def test_actives_are_kept_across_streams_and_given_back(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker("board0", on_submit=accepts)
        sections = {"tenants": [{"name": "default"}, {"name": "red", "max_active": 2}]}
        router = await stage.serve(worker, sections=sections)
        key = (await new_key(router, "red"))["key"]
        clients = [await HttpClient.connect(router.port) for _ in range(2)]
        for client in clients:
            client.post(PATH, STREAM, f"authorization: Bearer {key}")
        await until(lambda: len(worker.submits) == 2)
        assert await value_of(router, 'calculet_router_tenant_active{tenant="red"}') == 2
        status, headers, body = await ask(router, key)
        assert (status, error_of(body)["code"]) == (429, "tenant_quota") and headers["retry-after"]
        worker.piece(worker.submits[0], "x")
        status, headers = await clients[0].head()
        assert headers["x-ratelimit-limit-active"] == "2"
        clients[0].close()
        await until(lambda: worker.cancels)
        again = await HttpClient.connect(router.port)
        again.post(PATH, CHAT, f"authorization: Bearer {key}")
        await until(lambda: len(worker.submits) == 3)

    stage.play(scene)


def test_the_openai_client_sees_what_it_knows(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await serve(stage)
        key = (await new_key(router, "blue"))["key"]
        url = f"http://127.0.0.1:{router.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="ck-wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as wrong:
                await client.models.list()
            assert wrong.value.code == "invalid_api_key"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            with pytest.raises(openai.PermissionDeniedError) as forbidden:
                await client.chat.completions.create(model="qwen3", messages=CHAT["messages"])
            assert forbidden.value.code == "permission_denied" and forbidden.value.param == "model"

    stage.play(scene)


def test_a_key_is_nowhere_to_be_found(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await serve(stage)
        key = (await new_key(router, "red", "--expires-days", "1"))["key"]
        wrong = "ck-0badc0de-" + "s" * 43
        answers = [await ask(router, key), await ask(router, wrong), await ask(router, key, {"model": 5})]
        answers += [await ask(router, key) for _ in range(4)]
        text = await metrics_of(router)
        router.terminate()
        assert await router.ended() == 0
        places = [body.decode() + str(headers) for _, headers, body in answers] + [text, "".join(router.log)]
        places += [path.read_bytes().decode("utf-8", "replace") for path in stage.folder.rglob("*") if path.is_file()]
        for place in places:
            assert key not in place and key.split("-", 2)[2] not in place and wrong not in place

    stage.play(scene)


def test_a_key_file_that_cannot_be_used_changes_nothing_and_shows(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await serve(stage)
        key = (await new_key(router, "red"))["key"]
        path = stage.folder / "state" / "keys.json"
        good = path.read_bytes()

        async def usable() -> bool:
            return await value_of(router, "calculet_router_keys_usable") == 1

        async def becomes(wanted: bool) -> None:
            async with asyncio.timeout(20):
                while await usable() is not wanted:
                    await asyncio.sleep(0.02)

        path.write_bytes(good[:-20])
        await becomes(False)
        assert (await ask(router, key))[0] == 200 and (await ask(router, None))[0] == 401
        path.write_bytes(good)
        await becomes(True)
        path.chmod(0o644)
        await becomes(False)
        path.unlink()
        await until(lambda: any("it is gone" in line for line in router.log))
        assert (await ask(router, None))[0] == 401, "a file that vanishes does not open the door"
        path.write_bytes(good)
        path.chmod(0o644)
        second = RouterProcess(stage.folder, BOARDS, sections=SECTIONS)
        second.start()
        assert await second.ended() == 78
        await until(lambda: any("keys.json: mode 0644 lets others at it" in line for line in second.log))
        path.chmod(0o600)
        await becomes(True)
        found = read_keys(path)
        assert found is not None and found.version == 1

    stage.play(scene)


def test_without_a_router_the_cli_works_and_says_when_it_counts(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = RouterProcess(stage.folder, BOARDS, sections=SECTIONS)
        none = await cli(router, "keys", "list")
        assert none.returncode == 0 and "nobody needs one" in none.stdout
        made = await cli(router, "keys", "create", "red")
        assert made.returncode == 0 and "when one starts" in made.stderr
        assert (await cli(router, "keys", "rotate", "ffffffff")).returncode == 1

    stage.play(scene)
