"""`kvferry explain`: the traces of requests, as the engines of this machine remember them, as text."""
