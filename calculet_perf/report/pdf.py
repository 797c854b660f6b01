"""The report as PDF, with the same words, tables and figures; by fpdf2 (the `perf` extra), which is imported when asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calculet_perf.report.drawing import Dot, Figure, Line, Path, Rect, Text
from calculet_perf.report.layout import Section, Table
from calculet_perf.report.model import Report
from calculet_perf.report.sections import sections

if TYPE_CHECKING:
    from fpdf import FPDF

Colour = tuple[int, int, int]
INK, SOFT, GRID = (28, 32, 36), (91, 100, 110), (226, 229, 233)
GOOD, BAD, UNSURE, NONE = (26, 127, 75), (192, 50, 43), (154, 103, 0), (119, 128, 138)
STATES: dict[str, Colour] = {
    "pass": GOOD,
    "better": GOOD,
    "fail": BAD,
    "worse": BAD,
    "insufficient_evidence": UNSURE,
    "undecided": UNSURE,
    "not_asked": NONE,
}
ROLES: dict[str, Colour] = {
    "series0": (37, 99, 201),
    "series1": (194, 65, 12),
    "series2": (107, 127, 42),
    "faint": (169, 177, 186),
    "better": GOOD,
    "worse": BAD,
    "part0": (139, 149, 161),
    "part1": (201, 162, 39),
    "part2": (58, 158, 165),
    "part3": (37, 99, 201),
    "part4": (124, 181, 232),
    "part5": (138, 99, 199),
    "part6": (208, 103, 157),
    "rest": (217, 221, 226),
    "grid": GRID,
    "axis": SOFT,
    "label": SOFT,
    "value": INK,
}
"""Roles of `drawing` in print."""
MOST_SCALE, PAIR_SCALE = 0.62, 0.5
"""Of a figure alone, and of two beside each other."""
GUTTER = 10.0
CHARACTER = 0.62
"""Mean width of a character over its font's size: short tables are not stretched over the page."""
WIDE_COLUMNS = 9
"""Tables with more columns are set smaller."""


def available() -> bool:
    """Whether fpdf2 is installed."""
    try:
        import fpdf  # noqa: F401
    except ImportError:
        return False
    return True


def render(report: Report) -> bytes:
    """The document.

    Raises:
        ImportError: fpdf2 is not installed.
    """
    from fpdf import FPDF

    pdf = FPDF(orientation="landscape", unit="pt", format="A4")
    pdf.set_margins(36, 36)
    pdf.set_auto_page_break(True, 40)
    pdf.set_title(f"{report.verdict.headline}: {report.run.run_id}")
    pdf.set_creator("calculet-perf")
    pdf.add_page()
    _head(pdf, report)
    for section in sections(report):
        _section(pdf, section)
    return bytes(pdf.output())


def _head(pdf: FPDF, report: Report) -> None:
    verdict = report.verdict
    colour = {0: GOOD, 3: UNSURE}.get(verdict.exit_code, BAD)
    _write(pdf, verdict.headline, 20, colour, "B")
    _write(pdf, verdict.claim_title + (f"; satisfies {verdict.milestone}" if verdict.milestone else ""), 11, SOFT)
    for check in verdict.reasons()[:3]:
        word = "Failed" if str(check.result) == "fail" else "Not shown"
        _write(pdf, f"{word}: {check.title} ({check.clause}). {check.why}", 10, STATES[str(check.result)])
    facts = [f"exit code {verdict.exit_code}, {verdict.conclusion.replace('_', ' ')}", f"run {report.run.run_id}"]
    facts += [f"base {report.base.run_id}"] if report.base else []
    if report.run.manifest is not None:
        manifest = report.run.manifest
        facts += [f"model {manifest['model']['alias']}", f"board {manifest['hardware']['board'] or 'not told'}"]
    facts += [f"started {report.run.started_utc}", f"{report.run.counted:,} requests count"]
    facts += [f"signed by {report.signed_by or 'nobody'}"]
    _write(pdf, "   |   ".join(facts), 10, INK)
    for label in verdict.labels:
        _write(pdf, f"! {label}", 9, UNSURE)
    pdf.ln(8)


def _section(pdf: FPDF, section: Section) -> None:
    # A heading stays with the figure or the first rows below it.
    scale = PAIR_SCALE if len(section.figures) > 1 else MOST_SCALE
    needed = 60 + (section.figures[0].height * scale if section.figures else 60)
    if pdf.get_y() + needed > pdf.h - 64:
        pdf.add_page()
    pdf.start_section(_latin(section.title))
    _write(pdf, section.title, 14, INK, "B")
    if section.lead:
        _write(pdf, section.lead, 9, SOFT)
    for place in range(0, len(section.figures), 2):
        _beside(pdf, section.figures[place : place + 2])
    for table in section.tables:
        _table(pdf, table)
    for line in section.lines:
        _write(pdf, f"- {line}", 8, INK)
    pdf.ln(10)


def _write(pdf: FPDF, text: str, size: float, colour: Colour, style: str = "") -> None:
    pdf.set_font("Helvetica", style, size)
    pdf.set_text_color(*colour)
    pdf.multi_cell(0, size * 1.35, _latin(text), new_x="LMARGIN", new_y="NEXT", align="L")


def _table(pdf: FPDF, table: Table) -> None:
    from fpdf.enums import TableBordersLayout
    from fpdf.fonts import FontFace

    if not table.rows:
        return
    size = 6.0 if len(table.head) > WIDE_COLUMNS else 7.5
    pdf.set_font("Helvetica", "", size)
    pdf.set_text_color(*INK)
    pdf.set_draw_color(*GRID)
    pdf.set_line_width(0.5)
    pdf.set_fill_color(255)
    align = tuple("RIGHT" if index in table.numeric else "LEFT" for index in range(len(table.head)))
    longest = [max(len(row[index]) for row in [table.head, *table.rows]) for index in range(len(table.head))]
    wanted = sum(min(max(length, 4), 70) * size * CHARACTER + 8 for length in longest)
    with pdf.table(
        width=min(pdf.epw, wanted),
        align="LEFT",
        col_widths=_widths(table),
        text_align=align,
        line_height=size * 1.35,
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        headings_style=FontFace(emphasis="BOLD", color=SOFT),
        padding=(1, 3, 1, 0),
    ) as drawn:
        for cells in [table.head, *table.rows]:
            row = drawn.row()
            number = len(drawn.rows) - 2
            state = STATES.get(table.states[number]) if table.states and number >= 0 else None
            for index, cell in enumerate(cells):
                row.cell(_latin(cell), style=FontFace(emphasis="BOLD", color=state) if state and index == 0 else None)
    pdf.ln(6)


def _widths(table: Table) -> tuple[float, ...]:
    """By what the columns hold, so that long reasons get the room."""
    rows = [table.head, *table.rows[:60]]
    longest = [max(len(row[index]) for row in rows) for index in range(len(table.head))]
    return tuple(min(max(length, 5), 60) ** 0.75 for length in longest)


def _beside(pdf: FPDF, figures: Sequence[Figure]) -> None:
    """One figure, or two of them beside each other."""
    room = (pdf.w - 2 * pdf.l_margin - GUTTER) / 2 if len(figures) > 1 else pdf.w - 2 * pdf.l_margin
    most = PAIR_SCALE if len(figures) > 1 else MOST_SCALE
    scale = min(most, *(min(room / figure.width, (pdf.h - 110) / figure.height) for figure in figures))
    height = max(figure.height for figure in figures) * scale
    if pdf.get_y() + height > pdf.h - 64:
        pdf.add_page()
    top = pdf.get_y()
    for place, figure in enumerate(figures):
        pdf.set_xy(pdf.l_margin + place * (room + GUTTER), top)
        _figure(pdf, figure, scale)
    pdf.set_xy(pdf.l_margin, top + 9 * 1.35 + height + 6)


def _figure(pdf: FPDF, figure: Figure, scale: float) -> None:
    left = pdf.get_x()
    pdf.set_font("Helvetica", "B", 9)
    pdf.set_text_color(*INK)
    pdf.cell(0, 9 * 1.35, _latin(figure.title), new_x="LEFT", new_y="NEXT")
    top = pdf.get_y()

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x * scale, top + y * scale

    for shape in figure.shapes:
        role = ROLES.get(shape.role.split()[-1], SOFT)
        match shape:
            case Line(x1, y1, x2, y2):
                _pen(pdf, role, 0.5 if shape.role in ("grid", "axis") else 1.4)
                pdf.line(*at(x1, y1), *at(x2, y2))
            case Path(points):
                _pen(pdf, role, 1.4)
                pdf.polyline([at(x, y) for x, y in points])
            case Rect(x, y, width, height):
                pdf.set_fill_color(*role)
                pdf.rect(*at(x, y), width * scale, height * scale, style="F")
            case Dot(x, y, radius):
                pdf.set_fill_color(*role)
                pdf.circle(*at(x, y), radius * scale, style="F")
            case Text(x, y, text, anchor, _, size):
                pdf.set_font("Helvetica", "", size * scale * 0.92)
                pdf.set_text_color(*role)
                width = pdf.get_string_width(_latin(text))
                place = at(x, y)
                pdf.text(place[0] - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor], place[1], _latin(text))


def _pen(pdf: FPDF, colour: Colour, width: float) -> None:
    pdf.set_draw_color(*colour)
    pdf.set_line_width(width)


def _latin(text: str) -> str:
    """The PDF's built-in fonts have Latin-1; what the report itself uses beyond it is spelled."""
    for special, plain in (("–", "-"), ("…", "..."), ("∞", "unbounded"), ("→", "->"), ("≤", "<="), ("≥", ">=")):
        text = text.replace(special, plain)
    return text.encode("latin-1", "replace").decode("latin-1")
