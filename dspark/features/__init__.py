"""Features: what the target's tapped layers say about every token of a corpus, stored once and shared."""
