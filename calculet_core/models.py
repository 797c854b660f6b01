"""A model generation's record (scheduling §10)."""

from __future__ import annotations

from dataclasses import dataclass

from calculet_core.states.model_generation import MODEL_GENERATION, ModelState


@dataclass(slots=True, eq=False)
class ModelGeneration:
    """An artifact configured on a board; written only by `calculet_worker.generation`."""

    id: int
    alias: str
    artifact_digest: str
    """sha256 over the artifact's manifest, hexadecimal."""
    calbin_sha256: str
    state: ModelState = MODEL_GENERATION.initial
    active_requests: int = 0
    inflight_jobs: int = 0
