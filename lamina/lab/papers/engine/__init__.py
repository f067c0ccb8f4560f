"""Run studies: choose the runs and their order, and judge the claims."""
