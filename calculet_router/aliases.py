"""A client's `model` is an alias; what it stands for right now is the fleet view's word, published as one message.

A request gets one artifact when it arrives. While a swap is under way an alias may have two, and a share of new requests goes to
the second one, evenly spread rather than by chance.

An alias that the configuration has and the view has not (nothing is loaded yet) is an empty pool, not an unknown model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from calculet_core.config import AdmissionConfig
from calculet_core.errors import CalculetError, ModelNotFound, NoReadyWorker
from calculet_core.wire import AliasView

_DEFAULTS = AdmissionConfig()


class Aliases:
    """Names that may be served, and each one's deadlines; `configured` maps an alias to its admission settings."""

    def __init__(self, configured: Mapping[str, AdmissionConfig]) -> None:
        self.take_configured(configured)
        self._views: dict[str, AliasView] = {}
        self._turns: dict[str, float] = {}
        self.mixed = False
        """Some alias has two artifacts."""

    def take_configured(self, configured: Mapping[str, AdmissionConfig]) -> None:
        """Other aliases and deadlines, from now on."""
        self._configured = dict(configured)

    def take(self, views: Iterable[AliasView]) -> None:
        """A newer fleet view's aliases replace all."""
        self._views = {view.alias: view for view in views}
        self.mixed = any(view.other is not None for view in self._views.values())

    def pick(self, name: str) -> AliasView | CalculetError:
        """What a new request for `name` gets."""
        view = self.resolve(name)
        if isinstance(view, CalculetError) or view.other is None:
            return view
        turn = self._turns.get(name, 0.0) + view.share
        self._turns[name] = turn % 1.0
        return view.other if turn >= 1.0 else view

    def versions(self, name: str) -> tuple[AliasView, ...]:
        """All artifacts that the alias has now, the first one first."""
        view = self._views.get(name)
        return () if view is None else (view,) if view.other is None else (view, view.other)

    def resolve(self, name: str) -> AliasView | CalculetError:
        """What `name` serves now; or 404 `model_not_found`, or 503 while a configured alias has nothing loaded."""
        view = self._views.get(name)
        if view is not None:
            return view
        if name in self._configured:
            return NoReadyWorker(f"model {name!r} is not loaded yet")
        return ModelNotFound(f"model {name[:128]!r} does not exist", param="model")

    def parks(self, name: str) -> int:
        """How many requests may wait for the alias's turn; 0: none."""
        view = self._views.get(name)
        return 0 if view is None else view.parks

    def known(self, name: str) -> bool:
        """Whether `name` may label a metric: labels come from a closed set."""
        return name in self._configured or name in self._views

    def views(self) -> tuple[AliasView, ...]:
        """All aliases of the view, in its order."""
        return tuple(self._views.values())

    def deadline_ms(self, name: str, asked_ms: int | None) -> int:
        """Milliseconds that a request may take: what was asked, never beyond the configured maximum; else the default."""
        limits = self._configured.get(name, _DEFAULTS)
        return min(limits.deadline_default_ms if asked_ms is None else asked_ms, limits.deadline_max_ms)
