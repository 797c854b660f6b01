"""What a simulated artifact is: how long its jobs take, and which token follows from a lane's content.

The rule is one function of everything that a lane holds: every token at its position adds one scrambled number to the lane's
digest, and the digest with the last token decides what comes next. The board and `reference_tokens` share it, so that an answer
can be checked without a board.
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
Words = NDArray[np.uint64]
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


_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_TOKEN_FACTOR, _POSITION_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)
_CHOICES, _MARGIN_SHIFT, _MARGIN_MASK, _EOS_SHIFT = np.uint64(63), np.uint64(20), np.uint64(0xFFF), np.uint64(40)
MARGIN_MIN, MARGIN_MAX = 0.5, 4.0

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
    """How an artifact's next token follows from a lane's content."""

    def __init__(self, manifest: Manifest, profile: SimProfile) -> None:
        self._salt = np.uint64(int(manifest.image_sha256[:16], 16))
        tokenizer = manifest.tokenizer
        self._eos = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self._eos_below = np.uint64(int(profile.eos_per_token * (1 << 24)) if tokenizer.eos_token_ids else 0)
        kinds = list(_AFTER)
        self._kind_of = np.full(tokenizer.vocab_size, kinds.index("other"), np.intp)
        for kind, letters in _LETTERS.items():
            self._kind_of[[ord(letter) for letter in letters]] = kinds.index(kind)
        self._choices = np.array([[ord(letter) for letter in (text * 64)[:64]] for text in _AFTER.values()], np.int32)

    def traces(self, token_ids: Ints, positions: Ints) -> Words:
        """What tokens at positions add to a lane's digest, uint64 [n]."""
        words = token_ids.astype(np.uint64)
        words *= _TOKEN_FACTOR
        words += positions.astype(np.uint64) * _POSITION_FACTOR
        words += self._salt
        return _scramble(words)

    def next_tokens(self, digests: Words, last: Ints) -> tuple[Ints, Floats]:
        """Of lanes with these digests, last given `last`: the next tokens and their margins over the second best, [n] each."""
        words = _scramble(digests ^ self._salt)
        tokens = self._choices[self._kind_of[last], (words & _CHOICES).astype(np.intp)]
        if self._eos_below:
            tokens[(words >> _EOS_SHIFT) < self._eos_below] = self._eos
        margins = ((words >> _MARGIN_SHIFT) & _MARGIN_MASK).astype(np.float32)
        margins *= (MARGIN_MAX - MARGIN_MIN) / int(_MARGIN_MASK)
        margins += MARGIN_MIN
        return tokens, margins

    def noise(self, size: int) -> Floats:
        """The row under every output, float32 [size], below 0."""
        return np.random.default_rng(int(self._salt)).uniform(-4.0, -1.0, size).astype(np.float32)


def _scramble(words: Words) -> Words:
    words ^= words >> _SHIFTS[0]
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


def reference_tokens(manifest: Manifest, prompt_ids: Sequence[int], count: int) -> list[int]:
    """The `count` greedy tokens that an honest run of the prompt gives; an EOS among them does not end it."""
    rule = TokenRule(manifest, profile_of(manifest))
    content = list(prompt_ids)
    digest = rule.traces(np.array(content, np.int32), np.arange(len(content), dtype=np.int32)).sum(keepdims=True)
    for _ in range(count):
        tokens, _ = rule.next_tokens(digest, np.array(content[-1:], np.int32))
        digest += rule.traces(tokens, np.array([len(content)], np.int32))
        content.append(int(tokens[0]))
    return content[len(prompt_ids) :]
