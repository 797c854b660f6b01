"""What a server tells of itself: `/v1/models`, `/version` and `/health` of Calculet, or whatever a foreign server has of them."""

from __future__ import annotations

from typing import Any

import msgspec


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """None: the server does not tell."""

    foreign: bool
    models: tuple[str, ...] = ()
    context: int | None = None
    """Positions of one sequence, prompt and output together."""
    profiles: tuple[int, ...] | None = None
    boards: int | None = None
    generation: int | None = None
    """Of the alias; None as well when its boards run different ones."""
    generations: dict[str, int] = {}
    calbin_sha256: str | None = None
    server_version: str | None = None
    server_commit: str | None = None
    image_digest: str | None = None
    calrt: str | None = None
    driver: str | None = None
    firmware: str | None = None
    board_serial_hash: str | None = None
    """Of all boards, joined by commas."""
    chips: int | None = None
    power_mode: str | None = None
    backend: str | None = None


def facts_of(alias: str, models: Any, version: Any) -> ServerFacts:
    """Facts from parsed answers; either may be None or something unexpected.

    Args:
        models: `/v1/models`.
        version: `/version`.
    """
    listed = [model for model in _list(models, "data") if isinstance(model, dict)]
    model = next((model for model in listed if model.get("id") == alias), {})
    ours = _dict(model.get("calculet"))
    told = _dict(version)
    boards = [board for board in _list(told, "boards") if isinstance(board, dict) and board.get("alias") in (alias, None)]
    generations = {str(board): int(number) for board, number in _dict(ours.get("generations")).items()}
    context = model.get("max_model_len") or _dict(model.get("meta")).get("n_ctx_train")
    profiles = ours.get("profiles")
    devices = [_dict(board.get("device")) for board in boards]
    serials = sorted({str(device["serial_hash"]) for device in devices if device.get("serial_hash")})
    return ServerFacts(
        foreign=not ours, models=tuple(str(model.get("id")) for model in listed),
        context=context if isinstance(context, int) else None,
        profiles=tuple(profiles) if isinstance(profiles, list) and profiles else None,
        boards=len(generations) or None, generations=generations, generation=_same(list(generations.values())),
        calbin_sha256=ours.get("calbin_sha256") or None, backend=ours.get("backend"),
        server_version=_text(told.get("version")), server_commit=_text(told.get("commit")),
        image_digest=_text(told.get("image_digest")),
        calrt=_text(_same([device.get("runtime") for device in devices])),
        driver=_text(_same([device.get("driver") for device in devices])),
        firmware=_text(_same([device.get("firmware") for device in devices])),
        board_serial_hash=",".join(serials) or None, chips=_same([board.get("chips") for board in boards]),
        power_mode=_text(_same([device.get("power_mode") for device in devices])),
    )  # fmt: skip


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any, key: str) -> list[Any]:
    found = _dict(value).get(key)
    return found if isinstance(found, list) else []


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _same(values: list[Any]) -> Any:
    """The one value that all have; None otherwise."""
    return values[0] if values and all(value == values[0] for value in values) else None
