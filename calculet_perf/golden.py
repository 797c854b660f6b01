"""Golden cases of a run (acceptance §8.3, §8.8): fixed greedy requests whose tokens must be the expected ones, before and
after.

Expectations come from a file that was recorded on a server known to be right, or, without a file, from the server itself: then
asked again it must say the same, and after the run still the same. Hashes of token ids and of text are never compared with each
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from calculet_perf.manifest import ManifestError
from calculet_perf.records import RequestRecord
from calculet_perf.workloads.cells import Cell, Shape
from calculet_perf.workloads.matrix import Golden
from calculet_perf.workloads.requests import Planned, Sender, requests_of


class GoldenCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of a golden file, `calculet-perf-golden/v1`; the prompt follows from the sample's name and the corpus."""

    schema: Literal["calculet-perf-golden/v1"] = "calculet-perf-golden/v1"
    name: str
    corpus: str
    prompt_tokens: int
    output_tokens: int
    sample_id: str
    token_hash: str


def corpus_name(sender: Sender) -> str:
    """What decides the prompts besides the sample's name."""
    corpus = sender.corpus
    return f"{'chat' if sender.chat else 'completions'}/{corpus.kind}/{corpus.low}-{corpus.high}/{sender.seed}"


def golden_requests(sender: Sender, golden: Golden, passes: int, run_id: str, moment: str) -> list[list[Planned]]:
    """Every case once in each pass. The samples are the same in every run of the same corpus and seed."""
    shared = msgspec.structs.replace(sender, unique=False)
    found = []
    for number in range(passes):
        one_pass = []
        for place, prompt in enumerate(golden.prompts):
            cell = Cell(
                id=f"golden/p{prompt}/o{golden.output}", kind="golden", arrival="single", shapes=(Shape(prompt, golden.output),),
                stream=True, sampling="greedy", asked_requests=1, concurrency=1,
            )  # fmt: skip
            (planned,) = requests_of(shared, cell, number, 1, f"{run_id}-{moment}")
            planned.case.arrival = "golden"
            planned.case.index = planned.asked.index = place
            one_pass.append(planned)
        found.append(one_pass)
    return found


def case_name(record: RequestRecord) -> str:
    """How a golden case is called."""
    return f"p{record.case.id.split('/p')[1].split('/')[0]}"


def judge(records: Iterable[RequestRecord], expected: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(hash of each case, failures): every request must have ended well, with the expected hash or the first one of its case.

    Args:
        expected: case -> hash; what is not in it is learned from the first answer.
    """
    learned, failures = dict(expected), []
    for record in records:
        name, got = case_name(record), record.result.token_hash
        where = f"{name}, pass {record.case.round}"
        if not record.ok:
            failures.append(f"{where}: failed with {record.result.error_code}")
        elif got is None:
            failures.append(f"{where}: the answer is empty")
        else:
            wanted = learned.setdefault(name, got)
            if got.partition(":")[0] != wanted.partition(":")[0]:
                failures.append(f"{where}: {got} cannot be compared with {wanted}: another kind of hash")
            elif got != wanted:
                failures.append(f"{where}: {got}, expected {wanted}")
    return learned, failures


def parse_golden(data: bytes, source: str, sender: Sender, golden: Golden) -> dict[str, str]:
    """The expectations of a golden file for this matrix.

    Raises:
        ManifestError: not such a file, recorded with another corpus, or without a case that the matrix has; names the line.
    """
    expected: dict[str, str] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            case = msgspec.json.decode(line, type=GoldenCase)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ManifestError(f"{source}:{number}: {error}") from None
        if case.corpus != corpus_name(sender):
            raise ManifestError(f"{source}:{number}: recorded with corpus {case.corpus}, this run has {corpus_name(sender)}")
        if case.output_tokens == golden.output:
            expected[case.name] = case.token_hash
    missing = [f"p{prompt}" for prompt in golden.prompts if f"p{prompt}" not in expected]
    if missing:
        raise ManifestError(f"{source}: no case {', '.join(missing)} of {golden.output} output tokens: record it again")
    return expected


def golden_lines(records: Sequence[RequestRecord], learned: Mapping[str, str], sender: Sender) -> bytes:
    """A golden file of answers that agreed."""
    lines, done = [], set[str]()
    for record in records:
        name = case_name(record)
        if name not in done and name in learned:
            done.add(name)
            case = GoldenCase(
                name=name, corpus=corpus_name(sender), prompt_tokens=int(name[1:]),
                output_tokens=record.workload.requested_output_tokens or 0, sample_id=record.case.sample_id,
                token_hash=learned[name],
            )  # fmt: skip
            lines.append(msgspec.json.encode(case) + b"\n")
    return b"".join(lines)
