"""`report`: compare runs on one HTML page."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lmmods.core.errors import UserError
from lmmods.extras.report import charts, tables
from lmmods.extras.report.numbers import format_percent, format_value
from lmmods.extras.report.reading import Run, read_runs
from lmmods.runs.folder import write_text


def report(runs: list[str], out: str = "report.html", overwrite: bool = False) -> None:
    """Compare runs on one self-contained HTML page with curves and tables.

    Args:
        runs: Run folders, finished or running, of either engine.
        out: HTML file to write; replaces an older report.
        overwrite: Also replace a file that is not a report.
    """
    path = Path(out)
    page = render(read_runs(runs), datetime.now().astimezone())
    try:
        _check_replaceable(path, overwrite)
        write_text(path, page)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}). Use another file.") from error
    print(f"Wrote {out} ({len(page.encode()) / 1024:,.0f} KiB, {len(runs)} run{'s' if len(runs) > 1 else ''}).")


def _check_replaceable(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise UserError(f"--out {path} is a folder. Use a file name.")
    if path.exists() and not overwrite:
        with open(path, "rb") as file:
            head = file.read(1024)
        if f'content="{GENERATOR}"'.encode() not in head:
            raise UserError(f"--out {path} exists and is not a report. Choose another file, or add --overwrite true.")


# ---------------------------------------------------------------------------------------------------------------------
# The page: one self-contained HTML file.

HERE = Path(__file__).parent
GENERATOR = "lmmods report"  # generator tag that identifies our pages
COLOURS, SHAPES = 8, 7  # in page.css and page.html.jinja; coprime, so that 56 runs look different


def render(runs: Sequence[Run], written: datetime, trials: tables.TrialTable | None = None) -> str:
    """Render the report on `runs` and the `trials` of a sweep as HTML; all text from runs is escaped."""
    main, other = charts.build_charts(runs)
    all_charts = [chart for pair in (*main, *other) for chart in pair]
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"full": format_value, "percent": format_percent, "breakable": make_breakable}
    script = (HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(
        generator=GENERATOR, css=Markup((HERE / "page.css").read_text(encoding="utf-8")), script=Markup(script),
        digest=Markup(digest), written=written, runs=runs, colours=COLOURS, shapes=SHAPES, geometry=charts,
        main=main, other=other, has_tokens=any(len(pair) > 1 for pair in (*main, *other)),
        points=_hover_data(all_charts), is_thinned=any(chart.is_thinned for chart in all_charts),
        has_gaps=any(chart.has_gaps for chart in all_charts), ranking_sign=tables.ranking_sign,
        metrics=tables.build_metrics_table(runs), settings=tables.build_settings_tables(runs),
        splits=tables.build_split_rows(runs), sources=tables.build_source_rows(runs),
        samples=tables.group_samples(runs), outcomes=tables.select_outcomes(runs), mmlu=tables.build_mmlu_bars(runs),
        class_scores=tables.build_class_tables(runs), measures=tables.MEASURES, trials=trials,
    )


def make_breakable(name: str) -> Markup:
    """Add line-break opportunities after the separators of a dotted key, path or snake_case name."""
    return Markup("<wbr>").join(re.split(r"(?<=[._/-])(?=.)", name))


def _hover_data(all_charts: list[charts.Chart]) -> Markup:
    """Return the hover data as JSON for a script element, whose text must not contain `<`.

    Each chart has its maximum x and its lines, with points as [x, SVG y or null, text of y].
    """
    content = [{"end": chart.x.high, "x": chart.x_name, "lines": [
        {"run": line.run, "metric": line.metric,
         "at": [[x, chart.y(y) if math.isfinite(y) else None, format_value(y)] for x, y in line.points]}
        for line in chart.lines]} for chart in all_charts]
    return Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))
