"""SmoothQuant (Xiao et al., 2022, arXiv:2211.10438): even out int8 inputs, then round to nearest.

The first part is ``finetune.quant.smoothing``, which every method does for int8 inputs when there is calibration data;
this one does nothing else. Costs the calibration's forwards.
"""

from __future__ import annotations

from finetune.quant.methods import METHODS, QuantMethod
from finetune.quant.methods.rtn import quantize_rtn

METHODS.register("smoothquant")(QuantMethod(needs_calibration=True, quantize=quantize_rtn))
