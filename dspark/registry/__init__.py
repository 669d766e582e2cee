"""MLflow: publishing packages and finding them again. Loads mlflow only where it must speak to the registry."""

from dspark.registry.receipts import Receipt

__all__ = ["Receipt"]
