"""The papers' workbench: their tables and figures as studies, with a verdict on each claim.

Nothing else of the package imports it, but for its command and its function of the API.
"""
