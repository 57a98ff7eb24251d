"""Drafters, dumps and engines in which one fault, or two, or none was planted, and what is right to say.

Nothing here knows the switches that the diagnosis searches: a fault is bytes of a checkpoint, keys of
its config.json, files of a dump, layers of a target, a release of an engine, or what a peer's trainer
made of a dump.
"""
