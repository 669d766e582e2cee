"""Training of a drafter: anchors, losses, the loop on accelerate, exact resume."""
