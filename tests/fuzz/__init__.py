"""Damaged and hostile input for everything that is read from a file, a folder or a command line.

`mutation`, `trees`, `pickles`, `containers` make inputs; `pixels`, `sets`, `tensors`, `runs`, `words` say who reads them; `harness`
and `watch` see what becomes of each, `suite` of all, and `bad` has parsers to try the harness on. docs/fuzzing.md has the figures.
"""
