"""dspark: train, calibrate, profile, prove, package and promote DSpark speculative drafters."""

__version__ = "0.1.0"
