"""SymExpLin (SEL) for PEFT: fine-tune dense weights in a curved space, merge back to an ordinary checkpoint."""

from importlib.metadata import version

from peft_sel.config import ScaleConfig, SELConfig
from peft_sel.errors import SELError
from peft_sel.layer import SELLayer
from peft_sel.model import SELModel
from peft_sel.registry import register

__version__ = version("peft_sel")

register()

__all__ = [
    "SELConfig",
    "SELError",
    "SELLayer",
    "SELModel",
    "ScaleConfig",
]
