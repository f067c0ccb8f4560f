"""Run studies: choose the trials and their order, and judge the claims."""
