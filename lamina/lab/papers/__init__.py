"""Repeat the papers' tables and figures as studies, and judge each claim.

Only the command `lamina study` and its Python function import this package.
"""
