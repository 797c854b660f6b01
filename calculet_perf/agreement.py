"""Do greedy answers agree (acceptance §14.1: no crosstalk of logits or KV between requests)?

The same sample under the same model gives the same tokens, alone or beside others. The reference is what the sample gave alone (or
in most of its answers, when it never ran alone); an answer that differs is suspect, and one that is another sample's answer is
certain crosstalk. Engines whose sums depend on the batch's size may differ by themselves where two tokens are nearly equal; who
measures such an engine says so, and then only certain crosstalk counts. Hashes are compared only with their own kind and length.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec

from calculet_perf.records import RequestRecord

Key = tuple[str, int, str]
"""Sample id, tokens, kind of hash."""
ALONE = ("single", "golden")


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """A greedy answer that is not its sample's."""

    request_id: str
    case: str
    sample_id: str
    token_hash: str
    expected: str
    swapped_with: str | None
    """The sample whose answer it is; null: nobody's."""


class Agreement:
    """Feed successful answers with `add`, then ask `disagreements`."""

    def __init__(self) -> None:
        self._alone: dict[Key, Counter[str]] = defaultdict(Counter)
        self._all: dict[Key, Counter[str]] = defaultdict(Counter)
        self._answers: list[tuple[str, str, Key, str]] = []

    def add(self, record: RequestRecord) -> None:
        """Take one; only greedy successes with a hash are compared."""
        answer, case = record.result.token_hash, record.case
        tokens = record.workload.actual_output_tokens
        if answer is None or tokens is None or case.sampling != "greedy" or case.expect_refusal or not record.ok:
            return
        key = (case.sample_id, tokens, answer.partition(":")[0])
        self._all[key][answer] += 1
        if case.arrival in ALONE:
            self._alone[key][answer] += 1
        self._answers.append((record.request_id, case.id, key, answer))

    @property
    def compared(self) -> int:
        """Answers whose sample was answered more than once."""
        return sum(sum(answers.values()) for answers in self._all.values() if sum(answers.values()) > 1)

    def disagreements(self) -> list[Disagreement]:
        """All of them, in the order of arrival."""
        expected = {key: (self._alone.get(key) or answers).most_common(1)[0][0] for key, answers in self._all.items()}
        owner = {(key[1], answer): key[0] for key, answer in expected.items()}
        return [
            Disagreement(
                request_id=request, case=case, sample_id=key[0], token_hash=answer, expected=expected[key],
                swapped_with=owner.get((key[1], answer)),
            )
            for request, case, key, answer in self._answers
            if answer != expected[key]
        ]  # fmt: skip
