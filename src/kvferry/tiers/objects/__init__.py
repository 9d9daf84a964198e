"""The object tier, which keeps chunk files in object storage that many machines share."""
