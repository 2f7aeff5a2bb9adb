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
from lmmods.extras.report.numbers import full, percent
from lmmods.extras.report.reading import Run, read_runs
from lmmods.runs.folder import write_text


def report(runs: list[str], out: str = "report.html", overwrite: bool = False) -> None:
    """Write one self-contained HTML page with the curves and tables of runs.

    Args:
        runs: Run folders, finished or running, of either engine.
        out: File to write; an older report there is replaced.
        overwrite: Replace also a file that is not a report.
    """
    path = Path(out)
    page = render(read_runs(runs), datetime.now().astimezone())
    try:
        _check_replaceable(path, overwrite)
        write_text(path, page)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}). Choose another file.") from error
    print(f"Wrote {out} ({len(page.encode()) / 1024:,.0f} KiB, {len(runs)} run{'s' if len(runs) > 1 else ''}).")


def _check_replaceable(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise UserError(f"--out {path} is a folder. Name the file to write.")
    if path.exists() and not overwrite:
        with open(path, "rb") as file:
            head = file.read(1024)
        if f'content="{GENERATOR}"'.encode() not in head:
            raise UserError(f"--out {path} is there and is no report. Choose another file, or add --overwrite true.")


# ---------------------------------------------------------------------------------------------------------------------
# The page: one self-contained HTML file.

HERE = Path(__file__).parent
GENERATOR = "lmmods report"  # generator tag that identifies our pages
COLOURS, SHAPES = 8, 7  # in page.css and page.html.jinja; coprime, so that 56 runs look different


def render(runs: Sequence[Run], written: datetime, trials: tables.TrialTable | None = None) -> str:
    """Render the report on `runs` and the `trials` of a sweep as HTML; all text from runs is escaped."""
    main, other = charts.draw_charts(runs)
    drawn = [chart for both in (*main, *other) for chart in both]
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"full": full, "percent": percent, "breakable": breakable}
    script = (HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(
        generator=GENERATOR, css=Markup((HERE / "page.css").read_text(encoding="utf-8")), script=Markup(script),
        digest=Markup(digest), written=written, runs=runs, colours=COLOURS, shapes=SHAPES, geometry=charts,
        main=main, other=other, has_tokens=any(len(both) > 1 for both in (*main, *other)), points=_points(drawn),
        thinned=any(chart.thinned for chart in drawn), gaps=any(chart.gaps for chart in drawn),
        direction=tables.direction,
        metrics=tables.metrics_table(runs), settings=tables.settings_tables(runs), splits=tables.split_rows(runs),
        sources=tables.source_rows(runs), samples=tables.sample_groups(runs),
        outcomes=tables.outcomes(runs), mmlu=tables.mmlu_bars(runs),
        classes_of=tables.class_tables(runs), measures=tables.MEASURES, trials=trials,
    )


def breakable(name: str) -> Markup:
    """Add line-break opportunities after the separators of a dotted key, path or snake_case name."""
    return Markup("<wbr>").join(re.split(r"(?<=[._/-])(?=.)", name))


def _points(all_charts: list[charts.Chart]) -> Markup:
    """Return the hover data as JSON for a script element, whose text may hold no `<`.

    For each chart: its largest x and its lines, each point as [x, SVG y or null, text of y].
    """
    content = [{"end": chart.x.high, "x": chart.x_name, "lines": [
        {"run": line.run, "metric": line.metric,
         "at": [[x, chart.y(y) if math.isfinite(y) else None, full(y)] for x, y in line.points]}
        for line in chart.lines]} for chart in all_charts]
    return Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))
