"""Adapters for the engines that kvferry plugs into; one package per engine."""
