"""The training objectives. A backbone's heads decide which objectives fit. objective_rows.py lists modules of
lamina.lab with more objectives.
"""
