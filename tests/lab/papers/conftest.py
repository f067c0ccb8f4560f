from training import tiny_runs

corpus = tiny_runs.corpus
