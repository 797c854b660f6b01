"""Fixed greedy questions to a fleet, outside of a run: what it answers before something is done to it, and after."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from calculet_perf.client.observation import Asked
from calculet_perf.shell.http import HttpClient
from calculet_perf.workloads.requests import ids_of

PATH = "/v1/completions"
LENGTHS = (4, 12)
OUTPUT = 8
_encode = msgspec.json.Encoder().encode


def question(alias: str, number: int, body: Mapping[str, object]) -> Asked:
    """One greedy request; `body` has its prompt and how many tokens, and may change everything else."""
    given = {"model": alias, "stream": True, "temperature": 0, "ignore_eos": True, **body}
    return Asked(number, _encode(given), f"probe-{number}", True)


def golden_question(alias: str, length: int) -> Asked:
    """The golden one of that prompt length."""
    return question(alias, 0, {"prompt": ids_of(f"golden/{length}", length, 33, 123), "max_tokens": OUTPUT})


async def golden_answers(client: HttpClient, alias: str, boards: int) -> list[str] | None:
    """Hashes of the golden answers, each asked twice per board; None when one failed or two of a kind differ."""
    hashes = []
    for length in LENGTHS:
        answers = [await client.ask(golden_question(alias, length), PATH) for _ in range(2 * boards)]
        found = {answer.token_hash for answer in answers}
        if any(answer.error_code for answer in answers) or len(found) != 1:
            return None
        hashes.append(str(found.pop()))
    return hashes
