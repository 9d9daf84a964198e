"""`kvferry explain`: asks the engines of this machine for the traces of requests, and prints them."""
