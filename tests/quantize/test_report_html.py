import html.parser
import re
import xml.etree.ElementTree as ET

import pytest

from llmq.quantize.report import LinearReport, QuantizationReport, ScalingReport
from llmq.quantize.report_html import render_report
from llmq.quantize.report_plots import heat_map, paired_bars


def linear(layer, kind, error, scheme="int4 g64 asymmetric", bytes_after=600, **more):
    name = f"model.layers.{layer}.{kind}"
    return LinearReport(name, scheme, (16, 64), 2048, bytes_after, weight_error=0.01, output_error=error, **more)


def report(linears, **changed):
    fields = {
        "tool": "llmq", "versions": {"torch": "2"}, "source": "a/<b>", "method": "awq", "scheme": "int4 g64",
        "recipe": {"method": "awq"}, "settings": {}, "group_size": {"value": 64, "reason": "as asked"},
        "calibration": {"source": "cal.txt", "num_tokens": 1024, "num_samples": 4}, "linears": linears,
        "scalings": [ScalingReport(0, "norm", ("a.q_proj", "a.k_proj"), alpha=0.5, error=0.01, unscaled_error=0.02)],
        "left_alone": {"lm_head": "tied"}, "bytes_before": 4096, "bytes_after": 1200, "predicted_bytes": 1200,
        "bits_per_weight": 4.7, "bits_per_quantized_weight": 4.3, "duration_s": 1.5, "warnings": ["a <warning>"],
    }  # fmt: skip
    return QuantizationReport(**(fields | changed))


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop() == tag


def test_the_page_is_whole_escaped_and_asks_nobody():
    page = render_report(report([linear(0, "mlp.up_proj", 0.02), linear(1, "mlp.up_proj", 0.002)]))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not [attrs for _, attrs in tags.seen if "src" in attrs or "href" in attrs]
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
    assert "a/&lt;b&gt;" in page
    assert "a &lt;warning&gt;" in page
    assert "1,024 tokens in 4 samples of cal.txt" in page
    assert 'data-key="0.02"' in page  # sorts by the number, not by what is shown of it
    assert "damping" not in re.search(r"<thead>.*?</thead>", page[page.index("linears") :], re.S).group()


def test_scales_of_the_kv_cache_are_said():
    page = render_report(report([linear(0, "mlp.up_proj", 0.02)], recipe={"method": "awq", "kv": "int8"}))
    assert "int8, a static scale for K and one for V of each layer" in page
    assert "KV-cache" not in render_report(report([linear(0, "mlp.up_proj", 0.02)]))


def test_mixed_bits_get_a_plot_of_their_own():
    alike = [linear(0, "mlp.up_proj", 0.02), linear(1, "mlp.up_proj", 0.02)]
    assert "Bits by layer" not in render_report(report(alike))
    mixed = [*alike, linear(1, "mlp.down_proj", 0.002, "int8 g64 asymmetric", 1100)]
    assert "Bits by layer" in render_report(report(mixed))


def test_experts_of_a_layer_share_a_cell_that_shows_the_worst():
    experts = [linear(0, f"mlp.experts.{number}.up_proj", error) for number, error in enumerate((0.01, 0.3, 0.02))]
    page = render_report(report(experts))
    assert "experts.1.up_proj: 30%" in page
    assert page.count("<rect") == 1 + 2  # a cell, and two bars of the one kind


def test_deeper_colour_for_a_larger_error():
    cells = {("q", 0): 0.001, ("q", 1): 0.01, ("q", 2): 0.1, ("k", 0): 0.0}
    svg = ET.fromstring(heat_map(cells, dict.fromkeys(cells, "hint")))
    opacity = [float(rect.get("fill-opacity")) for rect in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert opacity == [0.08, pytest.approx(0.54), 1.0, 0.08]


def test_bars_share_one_scale():
    svg = ET.fromstring(paired_bars([("a", 100, 25, ""), ("b", 50, 50, "")]))
    widths = [float(rect.get("width")) for rect in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths == [520, 130, 260, 260]
