"""Measure a cluster: its links, a model's step with every hook, and what hooks take by themselves."""
