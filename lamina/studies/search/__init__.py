"""Searches: Optuna proposes settings, cheap rungs drop most of them, a race over paired seeds decides."""
