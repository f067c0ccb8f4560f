"""The parts that all jobs share: the output folder, its files, and how a job resumes and ends. Loads no torch."""
