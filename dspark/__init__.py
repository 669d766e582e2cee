"""dspark: train, calibrate, profile, prove, package and promote DSpark speculative drafters.

The names below are what programs need; each is loaded from its room when it is first used, so that `import dspark`
loads nothing. Those of `LIGHT` work in the light base install, with numpy; the others need `dspark[pipeline]`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dspark.calibration.assessment import assess
    from dspark.calibration.records import Records
    from dspark.calibration.temperatures import fit_temperatures
    from dspark.decoding.loop import decode
    from dspark.errors import DsparkError
    from dspark.evaluation.decoding import evaluate
    from dspark.package.opened import Package, load_package
    from dspark.scheduling.config import read_scheduler
    from dspark.scheduling.cost import CostCurve
    from dspark.scheduling.delayed import DelayedPrefixScheduler
    from dspark.scheduling.prefix import PrefixScheduler
    from dspark.scheduling.survival import prefix_survival
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

# Where each name is at home, in the order in which the reference explains them. Relative: a module's whole name in a
# text counts as an import of every stage (workspace/code.py).
LIGHT = {
    "load_package": "package.opened",
    "Package": "package.opened",
    "read_scheduler": "scheduling.config",
    "PrefixScheduler": "scheduling.prefix",
    "DelayedPrefixScheduler": "scheduling.delayed",
    "CostCurve": "scheduling.cost",
    "prefix_survival": "scheduling.survival",
    "Records": "calibration.records",
    "fit_temperatures": "calibration.temperatures",
    "assess": "calibration.assessment",
    "read_record": "targets.record",
    "DsparkError": "errors",
}
HEAVY = {
    "load_target": "targets.loading",
    "decode": "decoding.loop",
    "evaluate": "evaluation.decoding",
}

__all__ = [
    "CostCurve",
    "DelayedPrefixScheduler",
    "DsparkError",
    "Package",
    "PrefixScheduler",
    "Records",
    "__version__",
    "assess",
    "decode",
    "evaluate",
    "fit_temperatures",
    "load_package",
    "load_target",
    "prefix_survival",
    "read_record",
    "read_scheduler",
]

# Type checkers know the names from above; with this function they would take any other for one, too.
if not TYPE_CHECKING:

    def __getattr__(name):
        """Load a public name from its room (PEP 562)."""
        from importlib import import_module

        home = LIGHT.get(name) or HEAVY.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = import_module(f"{__name__}.{home}")
        except ModuleNotFoundError as missing:
            if name in LIGHT or (missing.name or "").partition(".")[0] == __name__:
                raise
            from .errors import PreflightError

            raise PreflightError(f"{__name__}.{name} needs {missing.name}", "pip install 'dspark[pipeline]'") from None
        globals()[name] = found = getattr(module, name)
        return found

    def __dir__():
        return sorted(set(globals()) | set(__all__))
