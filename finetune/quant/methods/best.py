"""The best for its time that measuring found: what gptq does, with scales and norms tuned much longer.

The second part is ``finetune.quant.tuning``, which this method's default of ``tuning_steps`` turns on.
"""

from __future__ import annotations

from finetune.quant.methods import METHODS, QuantMethod
from finetune.quant.methods.gptq import quantize_gptq

METHODS.register("best")(QuantMethod(needs_calibration=True, quantize=quantize_gptq, makes_up_for_drift=True))
