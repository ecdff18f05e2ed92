"""SymExpLin (SEL) for PEFT: fine-tune dense weights in a curved space, merge back to an ordinary checkpoint."""

from importlib.metadata import version

from peft_sel.checkpoint import export_weights, merge_checkpoint
from peft_sel.config import ScaleConfig, SELConfig
from peft_sel.errors import SELError
from peft_sel.layer import SELLayer
from peft_sel.logs import SELCallback
from peft_sel.lora import LoraFit, save_as_lora
from peft_sel.model import SELModel
from peft_sel.optim import create_sel_optimizer, create_sel_scheduler, sel_param_groups
from peft_sel.registry import extend_cards, extend_loading, extend_saving, quieten_wrapping, register
from peft_sel.saving import read_adapter, save_adapter
from peft_sel.training import SELTrainer, SELTrainerMixin

__version__ = version("peft_sel")

register()
quieten_wrapping()
extend_loading(read_adapter)
extend_saving()
extend_cards()

__all__ = [
    "LoraFit",
    "SELCallback",
    "SELConfig",
    "SELError",
    "SELLayer",
    "SELModel",
    "SELTrainer",
    "SELTrainerMixin",
    "ScaleConfig",
    "create_sel_optimizer",
    "create_sel_scheduler",
    "export_weights",
    "merge_checkpoint",
    "save_adapter",
    "save_as_lora",
    "sel_param_groups",
]
