"""The pages, one file for each kind of folder: ``lamina.reports.registry`` finds them here."""
