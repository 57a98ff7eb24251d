"""A lint for drafters, their targets, data and engines: headers and configs only, no torch.

`subject` reads what is there; a module a family of checks says what will not fit together; `report`
runs them all. A check is a function of the subject that yields findings, and yields none where all
is well.
"""
