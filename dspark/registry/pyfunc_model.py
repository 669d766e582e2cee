"""The registered model, from code: confidences of a batch of requests in, verification lengths out.

MLflow copies this file beside the package and runs it on loading; it needs dspark's light base and NumPy, nothing is
unpickled. One call plans one engine step with the packaged temperatures and cost (early stop, Algorithm 1 of
DSpark, section 3.2.2): it keeps no memory, so a package whose policy is `scheduled-delayed` is planned the same way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np

from dspark.errors import SettingsError
from dspark.package.layout import SCHEDULER
from dspark.scheduling import PrefixScheduler
from dspark.scheduling.config import SchedulerConfig, read_scheduler


class VerificationLengths(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Verification lengths by the packaged scheduler."""

    def load_context(self, context: Any) -> None:
        """Read `scheduler/scheduler.json` of the package that the model was logged with."""
        self.config = read_scheduler(Path(context.artifacts["package"]) / SCHEDULER)

    def predict(
        self,
        context: Any,
        model_input: np.ndarray,  # MLflow knows the bare type and warns about others
        params: dict[str, Any] | None = None,
    ) -> np.ndarray[Any, Any]:
        """Plan one step.

        Args:
            context: not needed after loading.
            model_input: raw confidence logits, one request per row, [requests, gamma].
            params: `profile`, the serving profile whose cost counts (empty: the only one); `temperature`, of the
                target's sampling (0: greedy).
        Returns:
            draft tokens to verify of each request, int64 [requests], each in 0..gamma; whole blocks of a drafter that
            has no confidence head.
        Raises:
            SettingsError: a profile or temperature that was not measured; names those that were.
            CalibrationError: logits that are not [requests, gamma], or NaN.
        """
        chosen = params or {}
        config = self.config
        if not config.calibrations:
            return np.full(len(model_input), config.gamma, np.int64)
        scheduler = PrefixScheduler(
            config.cost(_profile(config, str(chosen.get("profile") or ""))),
            config.gamma,
            config.calibration(float(chosen.get("temperature") or 0.0)).temperatures,
            min_budget=config.min_budget,
            max_budget=config.max_budget,
            min_predicted_gain=config.min_predicted_gain,
        )
        survival = scheduler.survival(np.asarray(model_input, dtype=np.float64))
        return scheduler.lengths(survival).astype(np.int64)


def _profile(config: SchedulerConfig, name: str) -> str:
    measured = sorted({*config.curves, *config.cost_models})
    if name or len(measured) == 1:
        return name or measured[0]
    raise SettingsError(
        f"the package has costs of {len(measured)} serving profiles: name one",
        f"params={{'profile': ...}}, one of: {', '.join(measured) or 'none'}",
    )


mlflow.models.set_model(VerificationLengths())
