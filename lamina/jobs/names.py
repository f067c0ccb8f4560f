"""The names of the files in a job's folder."""

from __future__ import annotations

CONFIG = "config.yaml"  # every setting
ENVIRONMENT = "environment.json"  # the job's kind, machine and packages
RESULT = "result.json"  # how the run ended, and the final numbers
PAGE = "report.html"
MANIFEST = "manifest.json"  # the files of a checkpoint, a model, or an entry of the data cache

# A run.
PLAN = "plan.json"
METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
NOTABLE_BATCHES = "notable.jsonl"  # unusual batches without an alarm
BATCHES = "batches.jsonl"  # rows of the batches with an alarm, and of unusual batches
NOTES = "notes.jsonl"  # of a scheduled probe
ABOUT = "about.json"  # of a scheduled probe

# A study and the other jobs.
STUDY = "study.yaml"
MEASURES = "measures.json"  # of a trial in a store
TRIAL = "trial.json"  # everything that determines the numbers of a trial in a store
RESULTS = "results.csv"
SEALED = "seal.json"  # the hashes of a job's tables, at the end of the job
CLAIMS = "claims.json"
TRANSFER = "transfer.json"
COORDINATES = "coordinates.parquet"
SLOPES = "slopes.csv"
PREFLIGHT = "preflight.json"
PREFLIGHT_ROWS = "preflight.csv"
LAYERS = "layers.parquet"  # of a preflight
