"""The figures of the paper, one module each."""

from __future__ import annotations

from ..figure import Figure
from . import complexity, fig1, fig2, fig3, fig4, fig5, fig6, fig7, fig8, fig9, rnn2d, rnn_long, rnn_suite

#: figures in the order of the paper
FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE
    for module in (fig1, fig2, fig3, fig4, fig5, fig6, fig7, fig8, fig9, complexity, rnn_suite, rnn_long, rnn2d)
}
