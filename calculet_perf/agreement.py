"""Do greedy answers agree (acceptance §14.1: no crosstalk of logits or KV between requests)?

The same sample under the same model gives the same tokens, alone or beside others. The reference is what the sample gave alone (or
in most of its answers, when it never ran alone); an answer that differs is suspect, and one that is another sample's answer is
certain crosstalk. Engines whose sums depend on the batch's size may differ by themselves where two tokens are nearly equal; who
measures such an engine says so, and then only certain crosstalk counts. Hashes are compared only with their own kind and length.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from calculet_perf.records import RequestRecord

Key = tuple[str, int, str]
"""Sample id, tokens (below 0: not told, by the limit that was asked), kind of hash."""
ALONE = ("single", "golden")
EXAMPLES = 20


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy answers that are not their sample's, all with the same tokens."""

    sample_id: str
    token_hash: str
    expected: str
    swapped_with: str | None
    """The sample whose answer it is; null: nobody's."""
    count: int
    requests: list[tuple[str, str]]
    """(request id, case) of the first `EXAMPLES`."""


@dataclass(slots=True)
class _Answer:
    count: int = 0
    alone: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)


class Agreement:
    """Feed successful answers with `add`, then ask `disagreements`."""

    def __init__(self) -> None:
        self._answers: dict[Key, dict[str, _Answer]] = defaultdict(lambda: defaultdict(_Answer))

    def add(self, record: RequestRecord) -> None:
        """Take one; only greedy successes with a hash are compared."""
        answer, case = record.result.token_hash, record.case
        tokens = record.workload.actual_output_tokens
        if tokens is None:  # a server that tells no counts: answers to one limit are alike in length too
            tokens = -1 - (record.workload.requested_output_tokens or 0)
        if answer is None or case.sampling != "greedy" or case.expect_refusal or not record.ok:
            return
        found = self._answers[case.sample_id, tokens, answer.partition(":")[0]][answer]
        found.count += 1
        found.alone += case.arrival in ALONE
        if len(found.examples) < EXAMPLES:
            found.examples.append((record.request_id, case.id))

    @property
    def compared(self) -> int:
        """Answers whose sample was answered more than once."""
        sums = [sum(answer.count for answer in answers.values()) for answers in self._answers.values()]
        return sum(count for count in sums if count > 1)

    def disagreements(self) -> list[Disagreement]:
        """All of them, in the order in which their samples came."""
        expected = {
            key: max(answers, key=lambda name: (answers[name].alone, answers[name].count)) for key, answers in self._answers.items()
        }
        owner = {(key[1], answer): key[0] for key, answer in expected.items()}
        return [
            Disagreement(
                sample_id=key[0], token_hash=name, expected=expected[key], swapped_with=owner.get((key[1], name)),
                count=answer.count, requests=answer.examples,
            )
            for key, answers in self._answers.items()
            for name, answer in answers.items()
            if name != expected[key]
        ]  # fmt: skip
