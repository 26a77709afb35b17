"""Telling people and Prometheus what is known, wished and done: from the published snapshot only."""
