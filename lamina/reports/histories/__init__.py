"""Convert other tools' training logs to the records of a watched run."""

from lamina.reports.histories.importing import History, import_history, is_history, read_history

__all__ = ["History", "import_history", "is_history", "read_history"]
