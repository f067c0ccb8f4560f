"""Describe, share and store trials. Studies with the same trial share it under its key."""
