"""The objectives, one file each, chosen by the heads that a backbone allows. For the lab's objective, see
objective_rows.py.
"""
