"""Evaluation: acceptance, losslessness, throughput, and the certification of an engine."""
