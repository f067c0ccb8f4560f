"""docs/results: what became of every claim, as pages in Markdown that are made from the records."""

from lamina.papers.results.pages import write_results

__all__ = ["write_results"]
