"""Number formats. Names and meaning are those of Megatron-LM's options; ``bf16`` is in ``training.py``."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.choices import Fp4Format, Fp4Recipe, Fp8Format, Fp8Recipe
from graphstep.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig(Section):
    """fp16, fp8 and fp4.

    Raises:
        ConfigError: unknown words; all problems at once.
    """

    fp16: bool = False
    """fp16 parameters with loss scaling."""
    loss_scale: float | None = None
    """Constant loss scale of fp16. None: dynamic, which looks for values that are not finite by itself."""
    fp8_format: Fp8Format | None = None
    """Format of fp8 matrix multiplications; None: no fp8."""
    fp8_recipe: Fp8Recipe = "delayed"
    """How fp8 scales are chosen."""
    fp8_param_gather: bool = False
    """Keep parameters in fp8 and gather them so."""
    fp4_format: Fp4Format | None = None
    """Format of fp4 matrix multiplications; None: no fp4."""
    fp4_recipe: Fp4Recipe = "nvfp4"
    """How fp4 scales are chosen."""
