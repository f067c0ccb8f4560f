"""The objectives, one file each (the lab's: see objective_rows.py), found by the heads that a backbone allows."""
