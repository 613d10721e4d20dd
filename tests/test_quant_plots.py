"""The pictures: the line of the best, and titles that end before the picture does."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from finetune.quant.plots import BEATEN_ALPHA, report_figure, sweep_figure

SWEEP: dict[str, Any] = {
    "model": "SmolLM2-135M-Instruct-finetuned-on-something-with-a-name-of-its-own-that-is-rather-long-for-a-title",
    "method": "smoothquant",
    "source_bytes": 269e6,
    "variants": [
        {"name": name, "output_bytes": size * 1e6, "bits_per_weight": 4.25, "kl": kl, "perplexity": 18 + kl,
         "unquantized_perplexity": 18.0, "held_out": False}
        for name, size, kl in (("w2a16", 85, 2.0), ("nf4", 113, 0.3), ("w4a16:64", 113, 0.1), ("w4a16:32", 116, 0.2),
                               ("w8a16", 164, 0.004))
    ],
}  # fmt: skip

REPORT: dict[str, Any] = {
    "settings": {"scheme": "w8a8_static", "group_size": None, "overrides": [{}], "method": "smoothquant"},
    "format": "compressed-tensors",
    "source_bytes": 269e9,
    "output_bytes": 113e9,
    "bits_per_weight": 8.125,
    "num_layers": 21000,
    "layers": [{"layer": f"model.layers.{index}.self_attn.q_proj", "relative_error": 0.01} for index in range(3)],
    "blocks": [{"hidden_error": 0.01 * (index + 1)} for index in range(3)],
    "end_to_end": {
        "unquantized_perplexity": 49152.123456,
        "perplexity": 1.7976931348623157e308,
        "perplexity_ratio": 3.6e303,
        "kl": 10.7,
        "top1_agreement": 0.861,
        "held_out": False,
    },
}


@pytest.mark.parametrize("draw", [lambda: report_figure(REPORT), lambda: sweep_figure(SWEEP)], ids=["report", "sweep"])
def test_the_title_fits_into_the_picture(draw: Any) -> None:
    figure = draw()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    title = figure._suptitle.get_window_extent(canvas.get_renderer())
    assert title.x1 <= figure.bbox.x1
    assert title.y1 <= figure.bbox.y1 + 1
    assert title.y0 >= figure.axes[0].get_tightbbox(canvas.get_renderer()).y1
    assert title.width > 0.4 * figure.bbox.width, "it isn't cut shorter than needed"


def test_figures_without_measure_are_not_written_out() -> None:
    title = report_figure(REPORT)._suptitle.get_text()
    assert "Perplexity 49,152 to 1.80e+308 (x3.60e+303)" in title
    assert len(title) < 400


def test_the_line_joins_the_schemes_that_none_beats_and_the_others_are_pale() -> None:
    left, right = sweep_figure(SWEEP).axes
    for axes in (left, right):
        line, *points = axes.lines[:6]
        assert list(line.get_xdata()) == [85, 113, 164], "w4a16:64 beats nf4 at its size and w4a16:32 at a larger one"
        assert line.get_linewidth() >= 1.5
        assert line.get_alpha() is None
        pale = [point.get_label().partition(",")[0] for point in points if point.get_alpha() == BEATEN_ALPHA]
        assert pale == ["nf4", "w4a16:32"]
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels[0] == "best for its size"
    assert labels[-1].startswith("unquantized")
