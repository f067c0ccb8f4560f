"""docs/results: Markdown pages with the verdict on every claim, made from the records."""

from lamina.papers.results.pages import write_results

__all__ = ["write_results"]
