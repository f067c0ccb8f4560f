"""The training objectives. A backbone's heads decide which objectives fit. objective_rows.py lists the modules in
lamina.lab with further objectives.
"""
