"""The file tier: chunk files in a directory that several processes share, within one capacity."""
