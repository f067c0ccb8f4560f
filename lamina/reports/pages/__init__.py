"""The pages, with one module per kind of folder. ``lamina.reports.registry`` imports all modules of this package."""
