"""The implementation of ``kvferry explain``.

It asks the engines of this machine for the traces of requests and renders them as text. A trace is the list
of events of one request.
"""
