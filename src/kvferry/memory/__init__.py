"""Memory as tensors: caches one owns, the guard of their views, the copies that pack and unpack images."""
