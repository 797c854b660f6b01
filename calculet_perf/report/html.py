"""The report as one HTML file: style and figures inside, nothing fetched, no script."""

from __future__ import annotations

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from calculet_perf.report.drawing import svg
from calculet_perf.report.model import Report
from calculet_perf.report.sections import sections

TEMPLATE_NAME = "report.html.j2"


def render(report: Report, template: str) -> bytes:
    """The page, UTF-8.

    Args:
        template: the text of `TEMPLATE_NAME`.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = lambda figure: Markup(svg(figure))
    return environment.from_string(template).render(report=report, verdict=report.verdict, sections=sections(report)).encode()
