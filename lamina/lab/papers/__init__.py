"""Reproduce tables and figures of papers as studies, and judge the papers' claims."""
