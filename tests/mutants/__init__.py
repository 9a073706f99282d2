"""Wrong versions of the code, each of which some test must notice.

A mutant is a textual patch. It is applied to a copy of src, never to src itself, and the tests named with it are run against
that copy. One that no test fails is a missing test, and an error here. To add one, write a few lines in the file of its area
(`core.py` and its like) and, for a new area, name that file in `catalogue.py`.
"""
