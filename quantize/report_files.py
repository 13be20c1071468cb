"""The report's two files in OUT: one for programs, one for people."""

import json
from pathlib import Path

from llmq.quantize.report import REPORT_FILE, QuantizationReport
from llmq.quantize.report_html import REPORT_PAGE, render_report


def write_report(folder: Path, report: QuantizationReport) -> None:
    """Write or replace both, each whole at any moment. Where nothing was rounded there is nothing to plot: no page."""
    texts = {REPORT_FILE: json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n"}
    if report.linears:
        texts[REPORT_PAGE] = render_report(report)
    for name, text in texts.items():
        partial = folder / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)
