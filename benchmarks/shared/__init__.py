"""Compare READs with host memory that two processes of one machine share."""
