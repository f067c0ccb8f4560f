"""The base of every job: its folder and files, how it resumes and how it ends. Loads no torch."""
