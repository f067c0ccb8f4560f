"""Describe and store trials, which several studies can share."""
