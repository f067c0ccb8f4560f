"""The training objectives. A backbone's heads decide which objectives fit. For the objective in lamina.lab, see
objective_rows.py.
"""
