"""Learned rounding: round to nearest, then let a block learn by the signs of gradients which weights go the other way.

The learning is ``finetune.quant.learned_rounding`` (SignRound, arXiv:2309.05516). An iteration takes the time of three
forwards of a chunk of the calibration samples; with 200 of them in each block it is the slowest of the methods.
"""

from __future__ import annotations

from finetune.quant.methods import METHODS, QuantMethod
from finetune.quant.methods.rtn import quantize_rtn

METHODS.register("learned")(QuantMethod(needs_calibration=True, quantize=quantize_rtn, learns=True))
