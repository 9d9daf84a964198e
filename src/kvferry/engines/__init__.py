"""Engines that kvferry plugs into; one package each."""
