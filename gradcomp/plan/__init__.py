"""Predict from constants which hook is fastest for a model on a network, and when not to compress."""

from .candidates import CANDIDATES, Candidate, candidate_named
from .hardware import CPU, GPUS, Gpu, Link, MeasuredDevice, Nodes, Rate, fitted_rate
from .measurements import Measurements
from .models import Bucket, buckets_of, built_in_model
from .prediction import Compute, StepPrediction, predict_step

__all__ = [
    "CANDIDATES",
    "CPU",
    "GPUS",
    "Bucket",
    "Candidate",
    "Compute",
    "Gpu",
    "Link",
    "MeasuredDevice",
    "Measurements",
    "Nodes",
    "Rate",
    "StepPrediction",
    "buckets_of",
    "built_in_model",
    "candidate_named",
    "fitted_rate",
    "predict_step",
]
