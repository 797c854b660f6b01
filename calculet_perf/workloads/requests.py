"""The requests of a cell: arrivals, classes and prompts, all from one seed."""

from __future__ import annotations

import hashlib
import random
import uuid
from typing import Any

import msgspec

from calculet_perf.client.observation import Asked
from calculet_perf.manifest import Manifest
from calculet_perf.records import Case
from calculet_perf.workloads.cells import Cell, Shape
from calculet_perf.workloads.matrix import Corpus, Matrix

_encode = msgspec.json.Encoder().encode
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family",
    "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program",
    "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact",
    "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house",
    "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city", "name", "team",
    "minute", "idea", "body", "back", "parent", "face", "level", "office", "door", "health", "person", "art", "war", "history",
    "party", "result", "change", "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher", "force",
    "education",
)  # fmt: skip
"""Common English words, about one token each for most tokenizers."""


class Planned(msgspec.Struct):
    """A request with what its record will say of it."""

    asked: Asked
    case: Case
    shape: Shape


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """How bodies are made for one server."""

    alias: str
    chat: bool
    corpus: Corpus
    unique: bool
    seed: int
    temperature: float
    top_p: float
    ignore_eos: bool
    timing: bool
    """Ask for Calculet's timing extension: tokens per chunk, the hash of the tokens, the server's own times."""
    extra_body: dict[str, Any]

    @property
    def sends_ids(self) -> bool:
        """Prompts are token ids, so that each has exactly its length."""
        return self.corpus.kind == "ids" and not self.chat

    @property
    def path(self) -> str:
        """Where requests go, under the server's root."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"


def sender_of(manifest: Manifest, matrix: Matrix, *, foreign: bool) -> Sender:
    """The sender of a run."""
    chat, corpus = manifest.server.api == "chat", matrix.corpus
    if chat and corpus.kind == "ids":
        corpus = msgspec.structs.replace(corpus, kind="text")  # chat takes no token ids
    return Sender(
        alias=manifest.model.alias, chat=chat, corpus=corpus, unique=foreign if corpus.unique is None else corpus.unique,
        seed=manifest.seed, temperature=matrix.sampled.temperature, top_p=matrix.sampled.top_p,
        ignore_eos=manifest.server.ignore_eos, timing=not foreign, extra_body=manifest.server.extra_body,
    )  # fmt: skip


def requests_of(sender: Sender, cell: Cell, round_: int, count: int, run_id: str) -> list[Planned]:
    """So many requests of a cell and round; bursts are filled up to whole groups.

    Poisson: the offsets are sums of exponential gaps, counted from the cell's start; latency is also measured from them.
    """
    # A generator by name: text seeds go through SHA-512, so that equal names give equal requests in every process.
    rng = random.Random(f"{sender.seed}/{cell.id}/{round_}")
    group_size = cell.group
    total = -(-count // group_size) * group_size
    shapes = _draw(cell, total, rng)
    planned, offset_ns, ordinals = [], 0, dict[int, int]()
    for index, shape in enumerate(shapes):
        if cell.arrival == "poisson" and cell.qps is not None:
            offset_ns += round(rng.expovariate(cell.qps) * 1e9)
        elif cell.arrival == "burst":
            offset_ns = round(shape.after_ms * 1e6)
        ordinal = ordinals[shape.prompt] = ordinals.get(shape.prompt, -1) + 1
        name = f"{cell.id}/{round_}/" if sender.unique else ""
        sample = f"{sender.corpus.kind}/{sender.seed}/{shape.prompt}/{name}{ordinal}"
        body = body_of(sender, sample, shape, sampling=cell.sampling, stream=cell.stream, seed=sender.seed + index)
        asked = Asked(index, body, label_of(run_id, cell.id, round_, index), cell.stream, offset_ns, index // group_size)
        case = Case(
            id=cell.id, round=round_, index=index, sample_id=sample, arrival=cell.arrival, sampling=cell.sampling,
            class_name=shape.name, active_lanes=cell.active_lanes, expect_refusal=cell.expect_refusal,
        )  # fmt: skip
        planned.append(Planned(asked, case, shape))
    return planned


def body_of(sender: Sender, sample: str, shape: Shape, *, sampling: str, stream: bool, seed: int) -> bytes:
    """A request's body, ready to send."""
    body: dict[str, Any] = {"model": sender.alias, "max_tokens": shape.output, "stream": stream}
    if stream:
        # Running usage is how vLLM tells tokens per chunk; others ignore it.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if sampling == "greedy":
        body["temperature"] = 0
    else:
        body |= {"temperature": sender.temperature, "top_p": sender.top_p, "seed": seed}
    if sender.ignore_eos:
        body["ignore_eos"] = True
    if sender.timing:
        body["calculet"] = {"timing": True}
    body |= sender.extra_body
    if sender.chat:
        body["messages"] = [{"role": "user", "content": text_of(sample, shape.prompt)}]
    elif sender.corpus.kind == "text":
        body["prompt"] = text_of(sample, shape.prompt)
    else:
        body["prompt"] = ids_of(sample, shape.prompt, sender.corpus.low, sender.corpus.high)
    return _encode(body)


def ids_of(sample: str, length: int, low: int, high: int) -> list[int]:
    """Token ids of a sample: the same for the same name."""
    return random.Random(sample).choices(range(low, high), k=length)


def text_of(sample: str, words: int) -> str:
    """A sample of so many words."""
    return " ".join(random.Random(sample).choices(WORDS, k=words))


def _draw(cell: Cell, total: int, rng: random.Random) -> list[Shape]:
    """The class of each request. Bursts: each group has its shapes in order of their time. Shares are kept over the cell as
    exactly as whole numbers allow, in a random order, so that two rounds differ in order and not in amount."""
    if cell.arrival == "burst":
        group = [shape for shape in sorted(cell.shapes, key=lambda one: one.after_ms) for _ in range(shape.count)]
        return group * (total // len(group))
    weight = sum(shape.share for shape in cell.shapes)
    exact = [shape.share / weight * total for shape in cell.shapes]
    counts = [int(number) for number in exact]
    for place in sorted(range(len(exact)), key=lambda place: counts[place] - exact[place])[: total - sum(counts)]:
        counts[place] += 1
    shapes = [shape for shape, number in zip(cell.shapes, counts, strict=True) for _ in range(number)]
    if len(cell.shapes) > 1:
        rng.shuffle(shapes)
    return shapes


def label_of(run_id: str, cell_id: str, round_: int, index: int) -> str:
    """A request's `x-request-id`: the same for the same request, and a UUID, because some servers refuse anything else."""
    name = f"{run_id}/{cell_id}/{round_}/{index}".encode()
    return str(uuid.UUID(bytes=hashlib.sha256(name).digest()[:16], version=4))
