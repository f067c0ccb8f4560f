"""The papers' tables and figures as studies, with a verdict on each claim.

Only the command `lamina study` and its Python function import this package.
"""
