"""Measure a cluster: its links, and a model's step with every hook."""
