"""The objectives, one file each, chosen by the heads that a backbone allows. For the objective in lamina.lab, see
objective_rows.py.
"""
