"""Decoding: the acceptance rule, the draft-verify loop over the target, and records of every decision."""
