"""The base of every job: the job's folder and files, and how a job resumes and ends. Loads no torch."""
