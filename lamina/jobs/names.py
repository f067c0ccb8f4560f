"""The names of the files in a job's folder, each stated once."""

from __future__ import annotations

CONFIG = "config.yaml"  # every setting
ENVIRONMENT = "environment.json"  # the job's kind, and what it ran on
RESULT = "result.json"  # how it ended
PAGE = "report.html"
MANIFEST = "manifest.json"  # of a checkpoint, a model, an entry of the data cache

# A run.
PLAN = "plan.json"
METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
NOTES = "notes.jsonl"  # of a scheduled probe
ABOUT = "about.json"  # of a scheduled probe

# A study and the other jobs.
STUDY = "study.yaml"
RESULTS = "results.csv"
CLAIMS = "claims.json"
TRANSFER = "transfer.json"
COORDINATES = "coordinates.parquet"
SLOPES = "slopes.csv"
PREFLIGHT = "preflight.json"
LAYERS = "layers.parquet"  # of a preflight
