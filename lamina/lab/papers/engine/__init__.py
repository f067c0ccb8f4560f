"""Run studies: choose the needed trials and their order, and judge the claims."""
