"""Describe and store a study's training runs, which several studies can share."""
