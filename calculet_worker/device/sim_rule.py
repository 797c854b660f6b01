"""What a simulated artifact is: how long its jobs take, and which token follows from a lane's content.

The rule is one function of everything that a lane holds: every token at its position adds one scrambled number to the lane's
digest, and the digest with the last token decides what comes next. The board and `reference_tokens` share it, so that an answer
can be checked without a board. Steps count in plain integers: they have few rows, and numpy's calls cost more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from calculet_core.artifact import Manifest
from calculet_core.errors import ConfigError

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
BatchSize = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,3}$")]

BYTES = 256
"""The vocabulary begins with the bytes; specials are above."""


class SimProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`backend_options` of a `sim` artifact: how long jobs take at the nominal frequency, in nanoseconds."""

    decode_ns: Annotated[dict[BatchSize, Natural], Meta(min_length=1)]
    """A step by compiled batch, as `"16": 21000000`; a size that is missing takes the next larger one's."""
    decode_context_ns: Annotated[float, Meta(ge=0)] = 0.0
    """Added for every position that the step's sequences hold together."""
    prefill_base_ns: Natural = 0
    prefill_token_ns: Natural = 0
    h2d_ns: Natural = 0
    d2h_ns: Natural = 0
    jitter: Annotated[float, Meta(ge=0, le=0.5)] = 0.0
    """Computing takes up to this share more or less, by the board's seed."""
    engines: Annotated[int, Meta(ge=1, le=2)] = 2
    """Jobs that may be in flight."""
    overlap: Share = 0.0
    """0: two jobs in flight compute one after the other; 1: they do not hinder each other."""
    eos_per_token: Share = 0.0
    """How often the next token is the first of `eos_token_ids`."""
    configure_ns: Natural = 0
    exact_cuts: Natural = 1
    """A prompt that is continued at a multiple of this is computed as in one job, elsewhere with other numbers; 0: nowhere."""

    def step_ns(self, batch: int) -> int:
        """A decode step of that compiled batch, nothing in its lanes.

        Raises:
            KeyError: neither it nor a larger one is stated.
        """
        larger = [int(size) for size in self.decode_ns if int(size) >= batch]
        if not larger:
            raise KeyError(f"B{batch}")
        return self.decode_ns[str(min(larger))]


def profile_of(manifest: Manifest) -> SimProfile:
    """The manifest's timing profile.

    Raises:
        ConfigError: it is wrong, lacks a profile's step, or the vocabulary has no room for bytes.
    """
    where = f"{manifest.name} {manifest.version}: $."
    try:
        profile = msgspec.convert(manifest.backend_options, SimProfile)
        profile.step_ns(manifest.compiled_batches[-1])
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ConfigError(f"{where}backend_options{path.rstrip('`')}: {message}") from None
    except KeyError as error:
        raise ConfigError(f"{where}backend_options.decode_ns: no step time for {error.args[0]}") from None
    if manifest.tokenizer.vocab_size < BYTES:
        raise ConfigError(f"{where}tokenizer.vocab_size: below {BYTES}, but simulated text is bytes")
    return profile


_MASK = (1 << 64) - 1
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_TOKEN_FACTOR, _POSITION_FACTOR = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
MARGIN_MIN, MARGIN_MAX = 12.0, 20.0
MARGIN_STEP = (MARGIN_MAX - MARGIN_MIN) / 0xFFF

_CONSONANTS, _VOWELS = "ntrslmdkvpbgzfh", "aeioaeiou"
_LETTERS = {"consonant": _CONSONANTS + _CONSONANTS.upper(), "vowel": _VOWELS, "space": " ", "punctuation": ",."}
_AFTER = {
    "consonant": _VOWELS,
    "vowel": _CONSONANTS + "nrst    " + _CONSONANTS + "ns     ,.",
    "space": _CONSONANTS + "aeio" + _CONSONANTS,
    "punctuation": " ",
    "other": _CONSONANTS.upper(),
}
"""What may follow, so that an answer reads as words."""


class TokenRule:
    """How an artifact's next token follows from a lane's content. A digest is 64 bits, as a plain integer."""

    def __init__(self, manifest: Manifest, profile: SimProfile) -> None:
        self._salt = int(manifest.image_sha256[:16], 16)
        self._of_position = np.arange(manifest.context, dtype=np.uint64) * np.uint64(_POSITION_FACTOR) + np.uint64(self._salt)
        tokenizer = manifest.tokenizer
        self._eos = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self._eos_below = int(profile.eos_per_token * (1 << 24)) if tokenizer.eos_token_ids else 0
        follow = {kind: [ord(letter) for letter in (text * 64)[:64]] for kind, text in _AFTER.items()}
        self._follow = [follow["other"]] * tokenizer.vocab_size
        for kind, letters in _LETTERS.items():
            for letter in letters:
                self._follow[ord(letter)] = follow[kind]

    def trace(self, token_id: int, position: int) -> int:
        """What a token at a position adds to a lane's digest (modulo 2^64)."""
        return _scramble(token_id * _TOKEN_FACTOR + position * _POSITION_FACTOR + self._salt)

    def traces(self, token_ids: Ints, start: int) -> int:
        """The sum of the traces of tokens at positions from `start` on."""
        words = token_ids.astype(np.uint64)
        words *= np.uint64(_TOKEN_FACTOR)
        words += self._of_position[start : start + len(words)]
        words ^= words >> np.uint64(30)
        words *= np.uint64(_FACTORS[0])
        words ^= words >> np.uint64(27)
        words *= np.uint64(_FACTORS[1])
        words ^= words >> np.uint64(31)
        return int(words.sum(dtype=np.uint64))

    def next_token(self, digest: int, last: int) -> tuple[int, float]:
        """Of a lane with this digest, last given `last`: the next token and its logit's margin over the second best."""
        word = _scramble(digest ^ self._salt)
        token = self._eos if word >> 40 < self._eos_below else self._follow[last][word & 63]
        return token, MARGIN_MIN + (word >> 20 & 0xFFF) * MARGIN_STEP

    def noise(self, size: int) -> Floats:
        """The row under every output, float32 [size], below 0."""
        return np.random.default_rng(self._salt).uniform(-4.0, -1.0, size).astype(np.float32)


def _scramble(word: int) -> int:
    word &= _MASK
    word = ((word ^ word >> 30) * _FACTORS[0]) & _MASK
    word = ((word ^ word >> 27) * _FACTORS[1]) & _MASK
    return word ^ word >> 31


def reference_tokens(manifest: Manifest, prompt_ids: Sequence[int], count: int) -> list[int]:
    """The `count` greedy tokens that an honest run of the prompt gives; an EOS among them does not end it."""
    rule = TokenRule(manifest, profile_of(manifest))
    digest, last, answer = rule.traces(np.array(prompt_ids, np.int32), 0), prompt_ids[-1], list[int]()
    for position in range(len(prompt_ids), len(prompt_ids) + count):
        last, _ = rule.next_token(digest, last)
        digest += rule.trace(last, position)
        answer.append(last)
    return answer
