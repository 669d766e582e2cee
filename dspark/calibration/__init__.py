"""Do the confidences mean what they say? Records, reliability metrics and sequential temperature scaling.

NumPy and pydantic only.
"""

from dspark.calibration.assessment import Assessment, PositionAssessment, assess
from dspark.calibration.records import Records
from dspark.calibration.reliability import auroc, brier, ece, reliability_table
from dspark.calibration.results import (
    Calibration,
    CalibrationReport,
    ReliabilityRow,
    STSResult,
    read_reliability,
    read_report,
    write_absence,
    write_results,
)
from dspark.calibration.temperatures import apply, fit_temperatures

__all__ = [
    "Assessment",
    "Calibration",
    "CalibrationReport",
    "PositionAssessment",
    "Records",
    "ReliabilityRow",
    "STSResult",
    "apply",
    "assess",
    "auroc",
    "brier",
    "ece",
    "fit_temperatures",
    "read_reliability",
    "read_report",
    "reliability_table",
    "write_absence",
    "write_results",
]
