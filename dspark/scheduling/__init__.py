"""How many drafted tokens are worth verifying: survival, what a step costs and the prefix scheduler.

NumPy and pydantic only, so that it runs inside any engine:

    from dspark.scheduling import PrefixScheduler
"""

from dspark.scheduling.additive import AdditiveCost, Cell, ModelErrors, fit_additive
from dspark.scheduling.config import CalibrationKey, SchedulerConfig, Temperatures, read_scheduler, write_scheduler
from dspark.scheduling.cost import CostCurve, DraftedCost, IsotonicRepair, StepCost, isotonic
from dspark.scheduling.delayed import DelayedPrefixScheduler
from dspark.scheduling.prefix import Plan, PrefixScheduler
from dspark.scheduling.survival import confidences, prefix_survival

__all__ = [
    "AdditiveCost",
    "CalibrationKey",
    "Cell",
    "CostCurve",
    "DelayedPrefixScheduler",
    "DraftedCost",
    "IsotonicRepair",
    "ModelErrors",
    "Plan",
    "PrefixScheduler",
    "SchedulerConfig",
    "StepCost",
    "Temperatures",
    "confidences",
    "fit_additive",
    "isotonic",
    "prefix_survival",
    "read_scheduler",
    "write_scheduler",
]
