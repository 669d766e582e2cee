"""Files on disk: atomic writes, digests, JSON and JSON lines, YAML 1.2, progress and events. No domain knowledge."""
