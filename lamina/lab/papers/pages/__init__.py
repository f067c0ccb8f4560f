"""Draw a study's tables and figures for report pages, docs and papers."""
