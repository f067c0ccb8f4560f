"""Draw a study's tables and figures for its report page, for the docs, and for a paper."""
