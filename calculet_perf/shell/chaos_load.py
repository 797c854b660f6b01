"""What clients do while a fleet is disturbed: requests at random times, each answer held against the undisturbed one."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from dataclasses import dataclass

import msgspec

from calculet_perf.chaos import Load, Reference, Tally
from calculet_perf.client.observation import Asked
from calculet_perf.shell.http import AskError, HttpClient
from calculet_perf.workloads.requests import ids_of

PATH = "/v1/completions"
LOW, HIGH = 33, 123
"""Token ids of prompts: in every vocabulary."""
STREAMED = 0.75
"""Share of requests whose answers are streamed."""
GOLDEN = (4, 12)
GOLDEN_OUTPUT = 8
ASKED_TWICE = 2
_encode = msgspec.json.Encoder().encode


class NoReference(Exception):
    """The fleet does not answer, or not twice the same, before anything was disturbed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One of the questions that are asked again and again."""

    prompt: list[int]
    output: int
    right: Reference


class ChaosLoad:
    """A load and its tally; `begin`, later `end`."""

    def __init__(self, client: HttpClient, model: str, load: Load, seed: int) -> None:
        self._client, self._model, self._load = client, model, load
        self._rng = random.Random(f"load {seed}")
        self._cases: list[Case] = []
        self._running: set[asyncio.Task[None]] = set()
        self._source: asyncio.Task[None] | None = None
        self.tally = Tally()

    async def learn(self) -> None:
        """Ask every question undisturbed, twice.

        Raises:
            NoReference: an answer is missing, or two of a kind differ.
        """
        shapes = [(length, output) for length in self._load.prompts for output in self._load.outputs]
        self._cases = list(await asyncio.gather(*(self._case(length, output) for length, output in shapes)))

    async def _case(self, length: int, output: int) -> Case:
        prompt = ids_of(f"chaos/{length}/{output}", length, LOW, HIGH)
        answers = set(await asyncio.gather(*(self._whole(prompt, output) for _ in range(ASKED_TWICE))))
        if len(answers) != 1:
            raise NoReference(f"a prompt of {length} tokens has two answers: greedy decoding should give one")
        text, tokens = answers.pop()
        return Case(prompt, output, reference(text, tokens))

    async def _whole(self, prompt: list[int], output: int) -> tuple[str, int]:
        try:
            answer = await self._client.fetch(PATH, self._body(prompt, output, False), timeout_s=60)
        except AskError as error:
            raise NoReference(str(error)) from None
        found = msgspec.json.decode(answer.body)
        if answer.status != 200:
            raise NoReference(f"{self._client.target.name}: {answer.status}: {found.get('error', {}).get('message')}")
        return found["choices"][0]["text"], found["usage"]["completion_tokens"]

    # ---------------------------------------------------------------- the load
    def begin(self) -> None:
        """Requests arrive from now on."""
        self._source = asyncio.create_task(self._arrivals())

    async def end(self, at_least: int = 0) -> None:
        """No more arrivals once `at_least` were sent; then wait for those that run."""
        while self.tally.sent < at_least:
            await asyncio.sleep(0.1)
        if self._source is not None:
            self._source.cancel()
            await asyncio.wait([self._source])
        while self._running:
            await asyncio.wait(self._running)

    async def _arrivals(self) -> None:
        due = time.monotonic()
        while True:
            due += self._rng.expovariate(self._load.rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            case, stream = self._rng.choice(self._cases), self._rng.random() < STREAMED
            if len(self._running) >= self._load.max_inflight:
                self.tally.left_out += 1
                continue
            self.tally.sent += 1
            task = asyncio.create_task(self._ask(case, self.tally.sent, stream))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _ask(self, case: Case, number: int, stream: bool) -> None:
        asked = Asked(number, self._body(case.prompt, case.output, stream), f"chaos-{number}", stream)
        seen = await self._client.ask(asked, PATH)
        label = f"request {seen.server_request_id or asked.request_id}"
        self.tally.count(label, seen.error_code, seen.token_hash, seen.output_tokens, case.right)

    async def golden(self, boards: int) -> list[str] | None:
        """Hashes of fixed greedy answers, each asked twice per board; None when one failed or two of a kind differ."""
        hashes = []
        for length in GOLDEN:
            body = self._body(ids_of(f"golden/{length}", length, LOW, HIGH), GOLDEN_OUTPUT, True)
            answers = [await self._client.ask(Asked(0, body, "golden", True), PATH) for _ in range(ASKED_TWICE * boards)]
            found = {answer.token_hash for answer in answers}
            if any(answer.error_code for answer in answers) or len(found) != 1:
                return None
            hashes.append(str(found.pop()))
        return hashes

    def _body(self, prompt: list[int], output: int, stream: bool) -> bytes:
        return _encode({
            "model": self._model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": stream,
        })  # fmt: skip


def reference(text: str, tokens: int) -> Reference:
    """Of an answer's text, as `client.answers` hashes what came."""
    digest, beginnings = hashlib.sha256(), []
    for letter in text:
        digest.update(letter.encode())
        beginnings.append(f"text:{digest.hexdigest()[:16]}")
    return Reference(beginnings[-1] if beginnings else "", frozenset(beginnings), tokens)
