"""The papers' workbench: their tables and figures as studies, with a verdict on each claim.

Only its command and its Python function import it.
"""
