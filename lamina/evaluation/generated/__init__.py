"""Seven multiple-choice tasks with exact answers, generated from the embedded corpus: they need no network."""
