"""Describe and store training runs that several studies can share."""
